"""Rules for the head of a request, and the errors of requests that break a limit of their connection."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.engine.api.errors import RequestError
from inferd.server.transport.limits import ConnectionLimits

Headers = Sequence[tuple[bytes, bytes]]


def ambiguity(http_version: str, headers: Headers) -> str:
    """Why a proxy may understand this head differently, although the parser accepts it; empty if it is clear."""
    if http_version not in ("1.0", "1.1"):
        return f"HTTP version {http_version} is not supported"
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and http_version == "1.1"):
        return f"it has {len(hosts)} Host headers instead of one"
    encodings = [value for name, value in headers if name == b"transfer-encoding"]
    if encodings and (http_version == "1.0" or encodings[0].strip().lower() != b"chunked"):
        return "the only supported Transfer-Encoding is chunked, in HTTP/1.1"
    return ""


def framing_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers that say where the body ends. None if there is no body."""
    return [
        (name, value)
        for name, value in headers
        if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b" 0"))
    ]


def malformed(reason: str) -> RequestError:
    return RequestError("malformed_http", f"We could not understand your request: {reason}.")


def head_too_large(limits: ConnectionLimits) -> RequestError:
    message = (
        "The head of the request is too large: request line and headers may have at most "
        f"{limits.max_head_bytes} bytes and {limits.max_headers} headers."
    )
    return RequestError("head_too_large", message)


def head_too_slow(limits: ConnectionLimits) -> RequestError:
    message = (
        f"The head of the request did not arrive in time: at most {limits.head_idle_s:g} s may pass between two of its "
        f"bytes, and {limits.head_s:g} s in total."
    )
    return RequestError("deadline_exceeded", message)
