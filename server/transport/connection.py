"""One HTTP connection: what a client may make the server hold, and how long it may make the server wait.

uvicorn waits without end for the rest of a head, for the rest of a body that nobody reads any more, and for a client
that does not read its answer; it takes heads of any length, any number of pipelined requests, and any amount of what is
neither head nor data: chunk extensions, trailers. Here each has a bound.
A body that somebody reads is bounded where it is read (`middleware.BodyLimit`), which has an answer to give. Knows no
route and no key.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from inferd.engine.api.errors import RequestError
from inferd.server.errors import table as errors
from inferd.server.transport.idle_timer import Patience

logger = logging.getLogger("inferd.server")

KEEP_ALIVE_S = 75
"""How long a connection may be idle between requests. Longer than what proxies keep theirs for (60 s): the side that
closes first must be the one that sends first, or it sends into a closed connection."""


_PIECE_BYTES = 16 * 1024
"""Bytes that the parser is given at a time: some 2,700 chunks of one byte."""
_MAX_EVENTS = 4_000
"""Chunks and headers after which the parser lets other tasks run: 3 ms of processor time (2 cores, AMD EPYC Zen 4,
2026-11-22). One read of 256 KiB may hold 44,000 of them, and the loop may read 32 times before it runs a task."""
_FREE_CHUNK_BYTES = 16
"""Bytes of each chunk's size line, extensions included, that do not count as framing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Times are of the loop's clock."""

    max_connections: int = 8_192
    max_head_bytes: int = 64 * 1024
    """Request line and headers."""
    max_headers: int = 256
    """Every layer that looks for a header walks through all of them."""
    max_pipelined: int = 16
    """Requests behind the one that is being answered. Bytes behind those are parsed as requests are answered."""
    max_framing_bytes: int = 16 * 1024
    """Bytes that a chunked body may have besides its data: extensions of chunks, trailers. As in Go's net/http, 16
    bytes a chunk and two for each byte of data do not count."""
    max_pipelined_bytes: int = 64 * 1024
    """Of theirs that are read while they wait. From there on, as from `max_pipelined`, nothing is read before the next
    one's turn, and that the client has gone is seen no sooner, or by a write that fails."""
    head_idle_s: float = 10.0
    """From one byte of a head to the next, and from a connection to its first."""
    head_s: float = 30.0
    """From a connection, or a head's first byte, to its end."""
    linger_s: float = 5.0
    """For the rest of a body whose answer is complete: the client is to read it before the connection breaks."""
    stall_s: float = 120.0
    """Without one byte of an answer taken."""
    write_buffer_bytes: int = 16 * 1024
    """Of answers that the kernel does not take; from there on a stream stands still."""
    unsent_bytes: int = 64 * 1024
    """Of answers that the kernel takes before they are on their way."""


class _RefusedError(Exception):
    """Ends the parsing of what was read."""


class _Flow(FlowControl):
    """Keeps reading paused while bytes that were read are not parsed yet, even if a request waits for its body."""

    is_full = False

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """Answers what breaks a bound with an error in OpenAI's shape, and closes; an answer that has begun breaks off."""

    def __init__(self, *, limits: ConnectionLimits, on_refused: Callable[[int], None], **given: Any) -> None:
        """`on_refused`: told the status of each refusal, 499 where nothing could be said. `given`: uvicorn's own."""
        super().__init__(**given)
        # uvicorn asks whether its logger has handlers, not what it was told; its line shows queries, which may hold
        # keys.
        self.access_log = False
        self._limits, self._on_refused = limits, on_refused
        self._awaits_head = True
        """Everything of the last message has come, and not yet the whole head of the next."""
        self._has_begun = False
        """Of that head, something has come."""
        self._is_framing = False
        """What is parsed is the head that `_go_on_after_upgrade` repeats."""
        self._num_head_bytes = 0
        self._num_unparsed = 0
        """What was read since the last head or message ended: the parser does not tell of a line before its end."""
        self._held = b""
        """Bytes that were read and are not parsed yet."""
        self._num_events = 0
        """Chunks and headers that were parsed in this turn of the loop."""
        self._num_chunks = self._num_data_bytes = 0
        """Chunks, and bytes of their data, in the piece being parsed."""
        self._num_framing_bytes: int | None = None
        """Framing bytes of this body that count. None until the piece in which its head ended, which is not counted, is
        parsed."""
        self._refusal: RequestError | None = None
        self._wait = Patience(self.loop)
        self._stall_timer: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None
        """Of the requests whose heads have come, the one that is being answered; `cycle` is the last of them."""

    # What the transport says

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        if sys.platform == "linux":
            # The kernel takes no more than this beyond what is on its way; left alone, its buffers grow to megabytes.
            kernel = transport.get_extra_info("socket")
            kernel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self._limits.unsent_bytes)
        if len(self.connections) > self._limits.max_connections:
            message = f"{self._limits.max_connections} connections are open, the most that may be; retry later."
            self._refuse(RequestError("server_is_overloaded", message))
            return
        self._wait.start(self._limits.head_idle_s, self._limits.head_s, self._waited_too_long)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait.stop()
        self._stop_stalling()
        self._unset_keepalive_if_required()
        # uvicorn tells the last request that its client has gone: it is this one that generates. Those behind it are
        # never begun, and would keep this connection for as long as it keeps them.
        self.cycle = self._answered  # type: ignore[assignment]
        self.pipeline.clear()
        self._held = b""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._wait.seen()
        self._parse(self._held + data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_stalling()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stalling()

    # What the parser says

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
        """Trailers are dropped: keys and bounds were checked without them."""
        self._num_events += 1
        if self._is_framing or not self._awaits_head:
            return
        self._count_head(len(name) + len(value))
        if len(self.headers) >= self._limits.max_headers:
            self._end_parsing(self._too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_framing:
            return
        fault = self._fault()
        if fault:
            self._end_parsing(_malformed(fault))
        super().on_headers_complete()
        self._awaits_head, self._num_framing_bytes = False, None
        self._wait.stop()

    def on_body(self, body: bytes) -> None:
        self._num_events += 1
        self._num_chunks += 1
        self._num_data_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing():
            return  # the parser takes the body for the other protocol's
        self._awaits_head, self._has_begun, self._num_unparsed = True, False, 0
        self._wait.stop()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held:
            self.loop.call_soon(self._parse_held)
        if not self._awaits_head and self.cycle.response_complete:
            self._wait.start(self._limits.linger_s, self._limits.linger_s, self._waited_too_long)
        elif self._has_begun and self._is_silent:
            # Of a head that was begun behind the answer: keep-alive's patience is for who has sent nothing.
            self._unset_keepalive_if_required()
            self._wait.start_once(self._limits.head_idle_s, self._limits.head_s, self._waited_too_long)

    def timeout_keep_alive_handler(self) -> None:
        """Not while the last answer is still being taken: whoever takes nothing of it is found by the stall timer."""
        if self.transport.get_write_buffer_size():
            if self._stall_timer is None:
                self._watch_stall()
            self._wait_for_next()
            return
        super().timeout_keep_alive_handler()

    # Our own

    @property
    def _is_silent(self) -> bool:
        """No answer is owed."""
        return self.cycle is None or (self.cycle.response_complete and not self.pipeline)

    def _parse_held(self) -> None:
        if self._held and not self.transport.is_closing():
            self._parse(self._held)

    def _parse(self, data: bytes) -> None:
        """Parse as many requests as may wait for their answers, for one turn of the loop; hold the rest."""
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
            self._wait.start_once(self._limits.head_idle_s, self._limits.head_s, self._waited_too_long)
        else:
            self._wait_for_next()  # the rest of a body whose answer came early

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Index up to which `data` may be parsed now, so that no more requests wait than may; `start` if none may."""
        num_unanswered = 0 if self._is_silent else 1 + len(self.pipeline)
        at, end = start, min(start + _PIECE_BYTES, len(data))
        for _ in range(self._limits.max_pipelined + 1 - num_unanswered):
            found = data.find(b"\r\n\r\n", at, end)
            if found < 0:
                return end
            at = found + 4
        return at

    def _parse_piece(self, piece: bytes) -> int:
        """Parse one piece and refuse what breaks a bound. Returns how many of its bytes were parsed."""
        num_parsed = len(piece)
        self._num_unparsed += num_parsed
        self._num_chunks = self._num_data_bytes = 0
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            num_parsed = upgrade.args[0]
            self._go_on_after_upgrade()
        except httptools.HttpParserError:
            self._refuse(self._refusal or _malformed("it is not valid HTTP/1.1"))
            return num_parsed
        if self._awaits_head:
            if self._num_unparsed > self._limits.max_head_bytes:
                self._refuse(self._too_large())
            return num_parsed
        self._num_unparsed = 0
        if self._num_framing_bytes is None:
            self._num_framing_bytes = 0
            return num_parsed
        num_framing = num_parsed - 3 * self._num_data_bytes - _FREE_CHUNK_BYTES * self._num_chunks
        self._num_framing_bytes = max(0, self._num_framing_bytes + num_framing)
        if self._num_framing_bytes > self._limits.max_framing_bytes:
            most = self._limits.max_framing_bytes
            self._refuse(_malformed(f"its body has more than {most} bytes of chunk extensions and trailers"))
        return num_parsed

    def _go_on_reading(self) -> None:
        """uvicorn reads nothing behind a request that waits, and would not see that the client has gone."""
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
        """As uvicorn does after an answer."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._limits.max_head_bytes:
            self._end_parsing(self._too_large())

    def _fault(self) -> str:
        """What of a head that the parser takes is ambiguous, so that a proxy may have understood something else."""
        http_version = self.parser.get_http_version()
        if http_version not in ("1.0", "1.1"):
            return f"version {http_version} is not spoken here"
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and http_version == "1.1"):
            return f"it has {len(hosts)} Host headers instead of one"
        encodings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if encodings and (http_version == "1.0" or encodings[0].strip().lower() != b"chunked"):
            return "the only Transfer-Encoding taken is chunked, of HTTP/1.1"
        return ""

    def _framing(self) -> list[tuple[bytes, bytes]]:
        """The headers that say where the body ends; none where there is none."""
        return [
            (name, value)
            for name, value in self.headers
            if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b" 0"))
        ]

    def _go_on_after_upgrade(self) -> None:
        """No other protocol is spoken: what follows is the body, or the next request.

        Java's client asks for HTTP/2 with its first request, body included. The parser has ended with the head, so it
        is told once more where the body ends.
        """
        framing = self._framing()
        if framing and not self._awaits_head:
            lines = b"".join(b"%s: %s\r\n" % header for header in framing)
            self._is_framing = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")
            self._is_framing = False

    def _too_large(self) -> RequestError:
        limits = self._limits
        message = (
            "The head of the request is too large: request line and headers may have "
            f"{limits.max_head_bytes} bytes and {limits.max_headers} headers."
        )
        return RequestError("head_too_large", message)

    def _end_parsing(self, refusal: RequestError) -> None:
        """From within a callback of the parser, which hands on no exception of ours."""
        self._refusal = refusal
        raise _RefusedError

    def _waited_too_long(self) -> None:
        if not self._awaits_head or not self._has_begun:
            self.transport.close()  # its answer is complete, or it asked for nothing
            return
        message = (
            f"The head of the request did not arrive: at most {self._limits.head_idle_s:g} s may pass between two of "
            f"its bytes and {self._limits.head_s:g} s in all."
        )
        self._refuse(RequestError("deadline_exceeded", message))

    def _refuse(self, error: RequestError) -> None:
        """Say so and close. Nothing is said in the middle of another answer: that one breaks."""
        self._wait.stop()
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
        response = errors.response_of(error)
        self._on_refused(response.status_code)
        close = (b"connection", b"close")
        headers = dict.fromkeys((*self.server_state.default_headers, *response.raw_headers, close))
        head = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body))
        self.transport.close()
        if self.cycle is not None:
            # Whoever reads the rest of the body learns that it will not come.
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _watch_stall(self) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._limits.stall_s, self._check_stall, num_bytes)

    def _check_stall(self, num_bytes_before: int) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes < num_bytes_before:
            self._stop_stalling()
            if num_bytes:
                self._watch_stall()
            return
        logger.debug("%s has taken nothing of its answer for %g s", self.client, self._limits.stall_s)
        self._on_refused(499)
        self.transport.abort()

    def _stop_stalling(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def _malformed(reason: str) -> RequestError:
    return RequestError("malformed_http", f"We could not understand your request: {reason}.")
