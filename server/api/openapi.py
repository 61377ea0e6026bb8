"""/openapi.json: the interface described by its own tables. Made once, when it is first asked for."""

from __future__ import annotations

import functools

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.server.exact import exact
from inferd.server.openapi import document


class OpenApi:
    """The route's handler."""

    def __init__(self, version: str) -> None:
        self._body = functools.cache(lambda: exact(orjson.dumps(document(version))))

    async def get(self, request: Request) -> Response:
        del request
        return Response(self._body(), media_type="application/json")
