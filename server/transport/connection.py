"""One HTTP connection: limits how much a client may make the server hold, and how long it may make the server wait.

uvicorn alone would wait without end for the rest of a head, for a body that has no reader, and for a client that does
not read its answer. It would accept heads of any length, any number of pipelined requests, and any amount of chunk
extensions and trailers. Here each of these has a limit. A body that has a reader is limited by the reader
(`middleware.BodyLimit`), which can still answer. This file knows no route and no key.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from inferd.engine.api.errors import RequestError
from inferd.server.errors import table
from inferd.server.transport.limits import (
    ConnectionLimits,
    IdleTimer,
    StallTimer,
    ambiguity,
    framing_headers,
    head_too_large,
    head_too_slow,
    malformed,
)

logger = logging.getLogger("inferd.server")

KEEP_ALIVE_S = 75
"""Seconds that a connection may be idle between requests. Proxies keep idle connections for 60 s. The side that sends
first must close first, or it sends into a closed connection.
"""

_PIECE_BYTES = 16 * 1024
"""Bytes that the parser gets at a time: about 2,700 chunks of one byte."""
_MAX_EVENTS = 4_000
"""Chunks and headers after which the parser lets other tasks run: 3 ms of processor time (2 cores, AMD EPYC Zen 4,
2026-11-22). One read of 256 KiB may hold 44,000 of them, and the loop may read 32 times before it runs a task."""
_FREE_CHUNK_BYTES = 16
"""Bytes of each chunk's size line that do not count as framing, extensions included."""


class _RefusedError(Exception):
    """Ends the parsing of the bytes that were read."""


class _Flow(FlowControl):
    """Keeps reading paused while read bytes wait to be parsed, even if a request waits for its body."""

    is_full = False

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


async def _without_chunks(
    cycle: RequestResponseCycle,
    app: ASGI3Application,
    scope: Scope,
    receive: ASGIReceiveCallable,
    send: ASGISendCallable,
) -> None:
    """Runs `app` for HTTP/1.0, which has no chunks: a body without a stated length ends with the connection."""
    is_open_ended = False

    async def send_unframed(message: ASGISendEvent) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            is_open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = False if is_open_ended else None
        elif message["type"] == "http.response.body" and is_open_ended:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_unframed)


class Connection(HttpToolsProtocol):
    """Answers a request that breaks a limit with an error in OpenAI's shape, and closes.

    If another answer has begun, the connection is aborted instead.
    """

    def __init__(self, *, limits: ConnectionLimits, on_refused: Callable[[int], None], **given: Any) -> None:
        """`on_refused` is called with the status of each refusal, or 499 if none was sent. `given`: uvicorn's own."""
        super().__init__(**given)
        # uvicorn ignores its own option and looks whether its logger has handlers. Its lines show queries, which may
        # hold keys.
        self.access_log = False
        self._limits, self._on_refused = limits, on_refused
        self._awaits_head = True
        """The last message is complete, but not the head of the next one."""
        self._has_begun = False
        """Part of that head has come."""
        self._is_framing = False
        """The parser reads the head that `_go_on_after_upgrade` repeats."""
        self._num_head_bytes = 0
        self._num_unparsed = 0
        """Bytes that were read since the last head or message ended. The parser does not report an unfinished line."""
        self._held = b""
        """Bytes that were read, but not parsed yet."""
        self._num_events = 0
        """Chunks and headers that were parsed in this turn of the loop."""
        self._num_chunks = self._num_data_bytes = 0
        """Chunks and bytes of their data in the current piece."""
        self._num_framing_bytes: int | None = None
        """Framing bytes of this body that count. None until the piece in which its head ended is parsed; that piece is
        not counted."""
        self._refusal: RequestError | None = None
        self._idle_timer = IdleTimer(self.loop)
        self._stall_timer = StallTimer(self.loop, limits.stall_s)
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered. `cycle` is the last request whose head has come."""

    # Called by the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        if sys.platform == "linux":
            # Limits the bytes that the kernel buffers before it sends them. By default it buffers megabytes.
            kernel = transport.get_extra_info("socket")
            kernel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self._limits.unsent_bytes)
        if len(self.connections) > self._limits.max_connections:
            message = f"The server has {self._limits.max_connections} open connections, the maximum. Try again later."
            self._refuse(RequestError("server_is_overloaded", message))
            return
        self._idle_timer.start(self._limits.head_idle_s, self._limits.head_s, self._waited_too_long)

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle_timer.stop()
        self._stall_timer.stop()
        self._unset_keepalive_if_required()
        # uvicorn tells only the last request that its client has gone, but this one generates. The requests behind it
        # never begin, and would keep this connection alive as long as it keeps them.
        self.cycle = self._answered  # type: ignore[assignment]
        self.pipeline.clear()
        self._held = b""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._idle_timer.seen()
        self._parse(self._held + data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer.stop()

    # Called by the parser

    def on_message_begin(self) -> None:
        if self._is_framing:
            return
        self._has_begun, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_framing:
            return
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Drops trailers, because keys and limits were checked without them."""
        self._num_events += 1
        if self._is_framing or not self._awaits_head:
            return
        self._count_head(len(name) + len(value))
        if len(self.headers) >= self._limits.max_headers:
            self._end_parsing(head_too_large(self._limits))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_framing:
            return
        reason = ambiguity(self.parser.get_http_version(), self.headers)
        if reason:
            self._end_parsing(malformed(reason))
        super().on_headers_complete()
        self._awaits_head, self._num_framing_bytes = False, None
        self._idle_timer.stop()

    def on_body(self, body: bytes) -> None:
        self._num_events += 1
        self._num_chunks += 1
        self._num_data_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and framing_headers(self.headers):
            return  # the parser treats the body as data of the other protocol
        self._awaits_head, self._has_begun, self._num_unparsed = True, False, 0
        self._idle_timer.stop()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            app = functools.partial(_without_chunks, cycle, app)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held:
            self.loop.call_soon(self._parse_held)
        if not self._awaits_head and self.cycle.response_complete:
            self._idle_timer.start(self._limits.linger_s, self._limits.linger_s, self._waited_too_long)
        elif self._has_begun and self._is_silent:
            # The next head has begun, so its own limits apply instead of keep-alive's.
            self._unset_keepalive_if_required()
            self._idle_timer.start_once(self._limits.head_idle_s, self._limits.head_s, self._waited_too_long)

    def timeout_keep_alive_handler(self) -> None:
        """Keeps the connection while the last answer is not all taken. The stall timer ends it if the client stops."""
        if self.transport.get_write_buffer_size():
            if not self._stall_timer.is_running:
                self._watch_stall()
            self._wait_for_next()
            return
        super().timeout_keep_alive_handler()

    # Our own methods

    @property
    def _is_silent(self) -> bool:
        """Whether every request so far is answered."""
        return self.cycle is None or (self.cycle.response_complete and not self.pipeline)

    def _parse_held(self) -> None:
        if self._held and not self.transport.is_closing():
            self._parse(self._held)

    def _parse(self, data: bytes) -> None:
        """Parse for one turn of the loop, up to `max_pipelined` requests. Hold the rest of the bytes."""
        self._unset_keepalive_if_required()
        self._num_events = start = 0
        self._held = b""
        while start < len(data) and self._num_events < _MAX_EVENTS:
            piece = data[start : self._end_of_piece(data, start)]
            if not piece:
                break
            start += self._parse_piece(piece)
            if self.transport.is_closing():
                return
        self._held = data[start:]
        if self._held:
            self.flow.is_full = True
            self.flow.pause_reading()
            if self._num_events >= _MAX_EVENTS:
                self.loop.call_soon(self._parse_held)
            return
        self._go_on_reading()
        if not self._is_silent or not self._awaits_head:
            return
        if self._has_begun or self._num_unparsed:
            self._idle_timer.start_once(self._limits.head_idle_s, self._limits.head_s, self._waited_too_long)
        else:
            self._wait_for_next()  # the rest of a body whose answer came early

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Index up to which `data` may be parsed now without exceeding `max_pipelined`; `start` if nothing may be."""
        num_unanswered = 0 if self._is_silent else 1 + len(self.pipeline)
        at, end = start, min(start + _PIECE_BYTES, len(data))
        for _ in range(self._limits.max_pipelined + 1 - num_unanswered):
            found = data.find(b"\r\n\r\n", at, end)
            if found < 0:
                return end
            at = found + 4
        return at

    def _parse_piece(self, piece: bytes) -> int:
        """Parse one piece, and refuse it if it breaks a limit. Returns how many of its bytes were parsed."""
        num_parsed = len(piece)
        self._num_unparsed += num_parsed
        self._num_chunks = self._num_data_bytes = 0
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            num_parsed = upgrade.args[0]
            self._go_on_after_upgrade()
        except httptools.HttpParserError:
            self._refuse(self._refusal or malformed("it is not valid HTTP/1.1"))
            return num_parsed
        if self._awaits_head:
            if self._num_unparsed > self._limits.max_head_bytes:
                self._refuse(head_too_large(self._limits))
            return num_parsed
        self._num_unparsed = 0
        if self._num_framing_bytes is None:
            self._num_framing_bytes = 0
            return num_parsed
        num_framing = num_parsed - 3 * self._num_data_bytes - _FREE_CHUNK_BYTES * self._num_chunks
        self._num_framing_bytes = max(0, self._num_framing_bytes + num_framing)
        if self._num_framing_bytes > self._limits.max_framing_bytes:
            most = self._limits.max_framing_bytes
            self._refuse(malformed(f"its body has more than {most} bytes of chunk extensions and trailers"))
        return num_parsed

    def _go_on_reading(self) -> None:
        """Resume reading behind a waiting request. uvicorn does not, and would not notice that the client has gone."""
        was_full, self.flow.is_full = self.flow.is_full, False
        if was_full and not self.pipeline and len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()
        if not 0 < len(self.pipeline) < self._limits.max_pipelined:
            return
        waiting = [cycle for cycle, _ in self.pipeline]
        num_bytes = sum(len(cycle.body) for cycle in waiting)
        num_bytes += sum(len(name) + len(value) for cycle in waiting for name, value in cycle.scope["headers"])
        if num_bytes < self._limits.max_pipelined_bytes:
            self.flow.resume_reading()

    def _wait_for_next(self) -> None:
        """Start the keep-alive timer, as uvicorn does after an answer."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._limits.max_head_bytes:
            self._end_parsing(head_too_large(self._limits))

    def _go_on_after_upgrade(self) -> None:
        """Ignore a request to upgrade: a body or the next request follows.

        Java's client asks for HTTP/2 in its first request, which may have a body. The parser stops after that head, so
        this repeats the headers that say where the body ends.
        """
        framing = framing_headers(self.headers)
        if framing and not self._awaits_head:
            lines = b"".join(b"%s: %s\r\n" % header for header in framing)
            self._is_framing = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")
            self._is_framing = False

    def _end_parsing(self, refusal: RequestError) -> None:
        """End the parsing from within a callback of the parser, which does not pass on our exceptions."""
        self._refusal = refusal
        raise _RefusedError

    def _waited_too_long(self) -> None:
        if not self._awaits_head or not self._has_begun:
            self.transport.close()  # the answer is complete, or there was no request
            return
        self._refuse(head_too_slow(self._limits))

    def _refuse(self, error: RequestError) -> None:
        """Send the error and close. If another answer has begun, abort the connection instead."""
        self._idle_timer.stop()
        if self.transport.is_closing():
            return
        logger.debug("refused a connection of %s: %s", self.client, error.message)
        if not self._awaits_head and self._is_silent:
            self._on_refused(499)
            self.transport.close()  # the body of a request whose answer is complete
            return
        if self.pipeline or (self.cycle is not None and self.cycle.response_started and not self._is_silent):
            self._on_refused(499)
            self.transport.abort()
            return
        response = table.response_of(error)
        self._on_refused(response.status_code)
        close = (b"connection", b"close")
        headers = dict.fromkeys((*self.server_state.default_headers, *response.raw_headers, close))
        head = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body))
        self.transport.close()
        if self.cycle is not None:
            # A reader of the body learns that the rest will not come.
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _watch_stall(self) -> None:
        self._stall_timer.start(self.transport, self._stalled)

    def _stalled(self) -> None:
        logger.debug("%s has taken nothing of its answer for %g s", self.client, self._limits.stall_s)
        self._on_refused(499)
        self.transport.abort()
