"""A plain answer that is too large for one object.

A thread makes each piece after the client has read the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferd.server.text.lanes import Lanes
from inferd.server.transport import sse


class LargeAnswer(Response):
    """JSON without a stated length (HTTP/1.1 sends it in chunks). Raises `ClientGoneError` if the client goes first."""

    media_type = "application/json"

    def __init__(self, pieces: Iterator[bytes], lanes: Lanes, headers: Mapping[str, str]) -> None:
        super().__init__(headers=dict(headers))
        del self.headers["content-length"]
        self._pieces, self._lanes = pieces, lanes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await sse.unless_disconnected(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while piece := await self._lanes.run(lambda: next(self._pieces, b""), 0, is_begun=True):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
