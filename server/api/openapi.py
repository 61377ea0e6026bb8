"""/openapi.json: the interface described by its own tables. Made when it is first asked for, with keys or without."""

from __future__ import annotations

import functools

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.server.api.openapi_document import document
from inferd.server.text.json_bytes import exact


class OpenApi:
    """The route's handler."""

    def __init__(self, version: str) -> None:
        self._body = functools.cache(lambda needs_key: exact(orjson.dumps(document(version, needs_key=needs_key))))

    async def get(self, request: Request) -> Response:
        return Response(self._body(request.state.needs_key), media_type="application/json")
