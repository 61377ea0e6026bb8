"""Which route a path that does not exist was likely meant for: clients have a wrong base URL, or another server's path.

It knows the table of routes, and no request.
"""

from __future__ import annotations

import difflib

from inferd.server.endpoints import routes
from inferd.server.errors.messages import MAX_ECHO

_ELSEWHERE = {
    "api/chat": routes.CHAT,
    "api/generate": routes.COMPLETIONS,
    "generate": routes.COMPLETIONS,
}
"""Ends of the paths of Ollama and SGLang -> the route that does the same."""

_OPENAI_BASE = "The base URL of an OpenAI client ends in one /v1."
_ANTHROPIC_BASE = "The base URL of an Anthropic client has no /v1."
_MOST_PARTS = 8
_LEAST_LIKENESS = 0.8


def way_out(method: str, path: str, prefix: str) -> str:
    """Names the route that was likely meant, and says how a base URL ends if that is wrong. Empty if no route is like
    the path, or if it is one of another port.

    `path`: without the `prefix` that a proxy removes.
    """
    parts = [part for part in path.split("/") if part]
    if routes.methods_of(path) or len(parts) > _MOST_PARTS or len(path) > MAX_ECHO:
        return ""
    meant = _with_the_end_of(parts)
    is_base_wrong = meant not in ("", f"/{'/'.join(parts)}")
    meant = meant or _like(method, path.rstrip("/"))
    if not meant:
        return ""
    known = [name for name in routes.methods_of(meant) if name != "HEAD"]
    asked = f" Did you mean {method if method in known else known[0]} {prefix}{meant}?"
    if not is_base_wrong or not meant.startswith("/v1/"):
        return asked
    if not meant.startswith(routes.MESSAGES.path):
        return f"{asked} {_OPENAI_BASE}"
    return f"{asked} {_ANTHROPIC_BASE}" if "v1" in parts else asked


def _with_the_end_of(parts: list[str]) -> str:
    """The route's path that has as many of the last parts as possible."""
    for start in range(len(parts)):
        end = "/".join(parts[start:])
        for path in (f"/v1/{end}", f"/{end}"):
            if routes.methods_of(path):
                return path
    return next((route.path for end, route in _ELSEWHERE.items() if f"/{'/'.join(parts)}".endswith(f"/{end}")), "")


def _like(method: str, path: str) -> str:
    paths = [route.path for route in routes.ROUTES if route.method == method and "{" not in route.path]
    return next(iter(difflib.get_close_matches(path, paths, n=1, cutoff=_LEAST_LIKENESS)), "")
