"""The page at /, and its files under /playground/. All of them come from this package, and none from another host.

The page is static: its scripts call the same routes as any client. It needs no key, and asks its reader for one if a
route does. All pages of the server have the headers that are made here, and a browser enforces them. No page may load
anything from another host, and no site may show a page in a frame: it could lay something over its buttons, and have a
visitor press them unknowingly. This file knows no engine.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from starlette.requests import Request
from starlette.responses import Response


def policy(*scripts: str) -> str:
    """The Content-Security-Policy of a page. `scripts`: hashes of its inline scripts, as the policy writes them."""
    allowed = " ".join(("'self'", *scripts))
    return (
        f"default-src 'none'; script-src {allowed}; worker-src 'self'; style-src 'self'; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def page_headers(*scripts: str) -> dict[str, str]:
    """All headers of a page. `scripts` as in `policy`."""
    return {
        "Content-Security-Policy": policy(*scripts),
        "X-Frame-Options": "DENY",  # for browsers that do not read frame-ancestors
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


STATIC = Path(__file__).parent / "static"
_MEDIA = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    tag: str
    """Hash of the body, as an entity tag (RFC 9110)."""


async def file(request: Request) -> Response:
    """The page or one of its files; 304 if the caller has it. The page's addresses are relative, so that it also works
    behind the prefix that a proxy removes."""
    found = _file(PurePosixPath(request.url.path).name if "/playground/" in request.url.path else "index.html")
    headers = page_headers() | {
        "Cache-Control": "no-cache",  # a browser asks with the tag, so it never mixes the files of two versions
        "ETag": found.tag,
    }
    known = request.headers.get("if-none-match", "")
    if found.tag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(found.body, media_type=found.media_type, headers=headers)


@functools.cache
def _file(name: str) -> _File:
    path = STATIC / name
    body = path.read_bytes()
    return _File(body, _MEDIA[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
