"""Server-sent events: their exact bytes, keep-alives, and clients that disconnect.

An event is `data: {json}\\n\\n`. A family of routes that names its events puts `event: {type}\\n` before it. Nothing
follows an error. The response begins with the first event or keep-alive, so that an earlier failure still gets its own
status. This file does not know what the events contain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.errors import messages as errors
from inferd.server.errors import table

logger = logging.getLogger("inferd.server")

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_S = 15.0
NOTICE_S = 1.0
"""Seconds between notices, which come sooner than keep-alives, because they explain why nothing else does."""

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


class Wording(Protocol):
    """The bytes that a family of routes sends besides its events."""

    @property
    def keep_alive(self) -> bytes:
        """Sent when nothing else was sent for too long. Every client ignores `KEEP_ALIVE`."""
        ...

    def failure(self, error: RequestError | EngineDeadError) -> bytes:
        """The last bytes of a stream that fails after its beginning."""
        ...


def event(json_bytes: bytes, name: str = "") -> bytes:
    """One event. `json_bytes` has no line break, because orjson writes none."""
    head = b"event: " + name.encode() + b"\ndata: " if name else b"data: "
    return b"".join((head, json_bytes, b"\n\n"))  # copied once


async def disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected. May be called only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, cancels `work` and raises `ClientGoneError`."""
    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
        # An error of the task refers to this frame. Undeleted, the error would keep itself and the request alive.
        del task, gone


class EventStream(Response):
    """Writes events as they come. `on_close` runs once at the end, even if nothing was sent."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        wording: Wording,
        on_close: Callable[[], None],
        keep_alive_s: float = KEEP_ALIVE_S,
        notice: Callable[[], bytes] | None = None,
    ) -> None:
        """`events` yields whole events, the last one included. `notice`: a comment to send in place of keep-alives, or
        nothing if there is none any more.

        If it raises an error, the stream ends with that error. If the stream has not begun, the call raises it.
        """
        super().__init__(status_code=200)
        self._events, self._wording, self._on_close = events, wording, on_close
        self._keep_alive_s, self._notice = keep_alive_s, notice
        self.init_headers(_HEADERS)
        del self.headers["content-length"]
        self._has_begun = self._is_over = False
        self._sending = asyncio.Lock()
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._now_s = asyncio.get_running_loop().time
        self._sent_s = self._now_s()
        self._state = scope["state"]
        writer = asyncio.create_task(self._write(send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            while not await self._one_ended(writer, gone):
                await self._send(send, self._unasked() or self._wording.keep_alive)
            if writer.done():
                writer.result()
        finally:
            self._on_close()
            writer.cancel()
            gone.cancel()
            await asyncio.gather(writer, gone, return_exceptions=True)
            del writer, gone  # as in `unless_disconnected`
            await self._events.aclose()

    async def _one_ended(self, *tasks: asyncio.Task[None]) -> bool:
        """Wait until a task ends. Returns False if nothing was sent for too long, and no send is in progress."""
        while True:
            silent_s = 0.0 if self._sending.locked() else self._now_s() - self._sent_s
            most_s = self._keep_alive_s if self._notice is None else min(self._keep_alive_s, NOTICE_S)
            if silent_s >= most_s:
                return False
            timeout_s = most_s - silent_s
            done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return True

    def _unasked(self) -> bytes:
        """The notice, as long as there is one."""
        notice = self._notice() if self._notice is not None else b""
        if not notice:
            self._notice = None
        return notice

    async def _write(self, send: Send) -> None:
        try:
            async for data in self._events:
                await self._send(send, data)
            await self._send(send, b"", is_last=True)
        except (RequestError, EngineDeadError) as error:
            await self._report(error, error, send)
        except Exception as error:
            await self._report(error, errors.internal_error(), send)

    async def _report(self, error: Exception, shown: RequestError | EngineDeadError, send: Send) -> None:
        """Send the error as the stream's end. Raises it if the response has not begun, so that it gets a status."""
        async with self._sending:
            if not self._has_begun:
                self._is_over = True
                try:
                    raise error
                finally:
                    del error, shown  # they refer to this frame, and would keep themselves alive
        if error is not shown:
            logger.error("a stream failed", exc_info=error)
        self._state["cause"] = table.cause_of(shown)
        await self._send(send, self._wording.failure(shown), is_last=True)

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        """Send whole pieces, one after another, and nothing after the last one."""
        async with self._sending:
            if self._is_over:
                return
            self._is_over = is_last
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            self._sent_s = self._now_s()
