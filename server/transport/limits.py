"""The limits of HTTP connections: how many fit the process's limit on open files, the timers of each, and what the head
of a request may be.

One timer is for input that comes too slowly, one for a client that does not take its answer. This file knows no
uvicorn, so that `inferd doctor` can ask it too.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inferd.engine.api.errors import ConfigError, RequestError

logger = logging.getLogger("inferd.server")

RESERVED_FILES = 96
"""Open files that are not connections. A server with a standby has 46 of them. A restart, grammar checks and refused
connections need some more."""
LEAST_CONNECTIONS = 16
"""The server does not start with fewer connections, unless the operator asked for fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of connections. Times are seconds of the event loop's clock."""

    max_connections: int = 8_192
    max_head_bytes: int = 64 * 1024
    """Maximum size of request line and headers."""
    max_headers: int = 256
    """Maximum number of headers. Every layer that looks for a header reads all of them."""
    max_pipelined: int = 16
    """Maximum number of requests behind the one that is being answered. Later bytes are parsed as answers end."""
    max_framing_bytes: int = 16 * 1024
    """Maximum number of bytes of a chunked body besides its data: chunk extensions and trailers. As in Go's net/http,
    16 bytes per chunk and two for each byte of data do not count."""
    max_pipelined_bytes: int = 64 * 1024
    """Maximum number of bytes of waiting requests. Above it, as above `max_pipelined`, the server stops reading. It
    then notices that the client has gone only at the next request's turn, or when a write fails."""
    head_idle_s: float = 10.0
    """Time for the first byte of a head, and between two of its bytes."""
    head_s: float = 30.0
    """Time for a whole head, from the connection or from its first byte."""
    linger_s: float = 5.0
    """Time for the rest of a body whose answer is complete. The client can read the answer before the connection
    closes."""
    stall_s: float = 120.0
    """Time in which a client must take at least one byte of its answer."""
    write_buffer_bytes: int = 16 * 1024
    """Bytes of answers that this process buffers when the kernel takes no more. A stream then waits."""
    unsent_bytes: int = 64 * 1024
    """Bytes of answers that the kernel buffers before it sends them."""


def connections_within(max_files: int, asked: int, num_reserved: int = RESERVED_FILES) -> int:
    """How many of the `asked` connections fit a limit of `max_files` open files. `RLIM_INFINITY` fits all."""
    return asked if max_files == resource.RLIM_INFINITY else min(asked, max_files - num_reserved)


def fit_open_files(limits: ConnectionLimits, num_held: int = 0) -> ConnectionLimits:
    """Raise this process's soft limit on open files as far as needed and allowed, and fit `max_connections` into it.

    `num_held`: files of models that are held open. Raises `ConfigError` if so few connections remain that the server
    would refuse nearly every client.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    asked, reserved = limits.max_connections, RESERVED_FILES + num_held
    if connections_within(soft, asked, reserved) == asked:
        return limits
    wanted = asked + reserved
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    num = connections_within(allowed, asked, reserved)
    if num == asked:
        return limits
    reason = (
        f"this process may open {allowed} files and needs {reserved} besides its connections; raise the hard "
        "limit (ulimit -Hn, systemd's LimitNOFILE=, Docker's --ulimit nofile=)"
    )
    if num < LEAST_CONNECTIONS:
        raise ConfigError(f"--max-connections {asked} needs more open files than allowed: {reason}")
    logger.warning(
        "the server accepts %d connections instead of %d: %s, or set --max-connections %d", num, asked, reason, num
    )
    return replace(limits, max_connections=num)


class IdleTimer:
    """Calls `late` once if nothing came for too long, or if the whole took too long.

    One timer serves both limits, and input does not restart it: when it fires, it looks whether something came in the
    meantime. It holds `late` only while it runs, so that a connection and its timer do not keep each other alive.
    """

    __slots__ = ("_began_s", "_idle_s", "_late", "_loop", "_seen_s", "_timer", "_total_s")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._late: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = self._seen_s = self._idle_s = self._total_s = 0.0

    def start(self, idle_s: float, total_s: float, late: Callable[[], None]) -> None:
        self.stop()
        self._late = late
        self._began_s = self._seen_s = self._loop.time()
        self._idle_s, self._total_s = idle_s, total_s
        self._set()

    def start_once(self, idle_s: float, total_s: float, late: Callable[[], None]) -> None:
        """Start the timer unless it runs."""
        if self._timer is None:
            self.start(idle_s, total_s, late)

    def seen(self) -> None:
        """Input came."""
        if self._timer is not None:
            self._seen_s = self._loop.time()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._late = None

    def _set(self) -> None:
        self._timer = self._loop.call_at(self._due_s, self._check)

    @property
    def _due_s(self) -> float:
        return min(self._seen_s + self._idle_s, self._began_s + self._total_s)

    def _check(self) -> None:
        self._timer = None
        if self._loop.time() < self._due_s:
            self._set()
        elif (late := self._late) is not None:
            self._late = None
            late()


class StallTimer:
    """Calls `late` if a write buffer does not get smaller for `stall_s` seconds. Stops when the buffer is empty."""

    __slots__ = ("_loop", "_stall_s", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, stall_s: float) -> None:
        self._loop, self._stall_s = loop, stall_s
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def start(self, transport: asyncio.WriteTransport, late: Callable[[], None]) -> None:
        self.stop()
        num_bytes = transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._stall_s, self._check, transport, num_bytes, late)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, transport: asyncio.WriteTransport, num_bytes_before: int, late: Callable[[], None]) -> None:
        self._timer = None
        num_bytes = transport.get_write_buffer_size()
        if num_bytes >= num_bytes_before:
            late()
        elif num_bytes:
            self.start(transport, late)


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
