"""The page at /, and its files under /playground/. All of them come from this package, and none from another host.

The page is static: its scripts call the same routes as any client. It needs no key, and asks its reader for one if a
route does. This file knows no engine.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from starlette.requests import Request
from starlette.responses import Response

from inferd.server.transport.page_headers import page_headers

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
