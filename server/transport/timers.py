"""Timers of a connection: one for input that comes too slowly, one for a client that does not take its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


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
