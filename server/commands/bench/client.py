"""An HTTP/1.1 client for streams that notes when bytes arrive and uses little processor time.

It knows events, but not their contents. One event costs 4.7 us of CPU from socket to parsed JSON; with httpx it costs
18 us (one core of a Zen 4, 16 streams). A general client would be the bottleneck before a small model is.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

OnEvent = Callable[[bytes, float], None]
"""Receives the payload of each `data:` event and the time (s) at which its last byte was read."""


class ClientError(Exception):
    """The exchange did not complete. Its text is short enough for a column of a report."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. `body` is empty if the answer was a stream of events."""

    status: int
    body: bytes


class Client:
    """A pool of keep-alive connections to one server. It belongs to one event loop and is not thread-safe."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        url = urlsplit(base_url)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._host = url.hostname or ""
        self._port = url.port or (443 if self._tls else 80)
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._head = f"Host: {url.netloc}\r\n" + (f"Authorization: Bearer {api_key}\r\n" if api_key else "")
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Reply:
        return await self._exchange("GET", path, b"", None)

    async def post(self, path: str, body: bytes, on_event: OnEvent | None = None) -> Reply:
        """Send `body` as JSON. `on_event` receives the events of a streamed 200. Raises `ClientError`."""
        return await self._exchange("POST", path, body, on_event)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, method: str, path: str, body: bytes, on_event: OnEvent | None) -> Reply:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}Accept: */*\r\n"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        else:
            head += "Cache-Control: no-cache\r\n"  # inferd keeps its metrics for a second
        request = head.encode("latin-1") + b"\r\n" + body
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._send(request, on_event)
        except TimeoutError:
            raise ClientError(f"timeout after {self._timeout_s:g} s") from None

    async def _send(self, request: bytes, on_event: OnEvent | None) -> Reply:
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._on(connection, request, on_event)
            except _ClosedWhileIdle:
                continue  # The server may close an idle connection at any time. It answered nothing, so try again.
        return await self._on(await self._connect(), request, on_event)

    async def _on(self, connection: _Connection, request: bytes, on_event: OnEvent | None) -> Reply:
        try:
            reply = await connection.exchange(request, on_event)
        except BaseException:
            connection.close()
            raise
        if connection.may_be_kept:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise ClientError(f"cannot connect: {error.strerror or error}") from error
        return connection


class _ClosedWhileIdle(ClientError):
    """A reused connection closed before any byte of an answer came."""


class _Connection(asyncio.Protocol):
    """One connection, with one exchange at a time. The parser calls the methods named `on_...`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[Reply] | None = None
        self._on_event: OnEvent | None = None
        self._buffer = b""
        self._now = 0.0
        self._is_events = self._has_begun = self._keeps_alive = False
        self._num_exchanges = 0

    @property
    def may_be_kept(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._keeps_alive

    async def exchange(self, request: bytes, on_event: OnEvent | None) -> Reply:
        if self._transport is None or self._transport.is_closing():
            raise _ClosedWhileIdle("connection closed by the server")
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._on_event, self._buffer, self._is_events, self._has_begun = on_event, b"", False, False
        self._num_exchanges += 1
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ClientError(f"not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        is_stale = self._num_exchanges > 1 and not self._has_begun
        self._fail((_ClosedWhileIdle if is_stale else ClientError)("connection closed by the server"))

    def _fail(self, error: ClientError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type" and value.startswith(b"text/event-stream"):
            self._is_events = True

    def on_body(self, body: bytes) -> None:
        self._buffer += body
        if self._on_event is None or not self._is_events or self._parser.get_status_code() != 200:
            return
        *events, self._buffer = self._buffer.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                self._on_event(event[6:], self._now)

    def on_message_complete(self) -> None:
        self._keeps_alive = self._parser.should_keep_alive()  # The parser forgets this after the callback.
        if self._done is not None and not self._done.done():
            self._done.set_result(Reply(self._parser.get_status_code(), self._buffer))
