"""How long to wait for what comes in pieces: a deadline for silence, and one for the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Patience:
    """Calls `late` once, when either has passed.

    One timer serves both, and pieces do not set it again: when it runs out it looks whether something came. Whom to
    call is known only while it runs, so that a connection and its patience do not keep each other.
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
        """Not where it runs."""
        if self._timer is None:
            self.start(idle_s, total_s, late)

    def seen(self) -> None:
        """Something came."""
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
