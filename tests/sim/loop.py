"""An event loop with virtual time: it jumps to the next timer as soon as no task is ready.

No threads, no sockets, no waiting. Ready tasks run in an order drawn by a seed, because no result may depend on the
order of wake-ups. If no task is ready and no timer is set, all tasks wait for ever, which is an error.
"""

from __future__ import annotations

import asyncio
from math import inf
from random import Random

from tests.sim.cells import SimulationError

_START_S = 1000.0


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop whose `time()` is virtual seconds. Each run has its own."""

    def __init__(self, rng: Random, limit_s: float) -> None:
        """`limit_s`: virtual seconds after which a run counts as endless."""
        super().__init__()
        self._now, self._end = _START_S, _START_S + limit_s
        self._rng = rng
        self._selector = self

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[object]:
        """Stands for a selector in the base class, once a turn: wait for so long, or for ever (None)."""
        if timeout is None:
            raise SimulationError("everyone waits, and nothing will ever happen")
        self._now += timeout
        if self._now > self._end:
            self._end = inf  # the remaining tasks must be able to end
            raise SimulationError(f"it still goes on after {self._now - _START_S:.0f} s")
        self._rng.shuffle(self._ready)
        return []

    def _process_events(self, event_list: list[object]) -> None:
        """There are no events."""

    def _write_to_self(self) -> None:
        """No other thread could wake the loop."""


class Clocks:
    """Stands for the module `time` in simulated code. The wall clock starts right and then jumps; the monotonic one is
    the loop's."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.wall_offset_s = 0.0

    def monotonic(self) -> float:
        return self._loop.time()

    def time(self) -> float:
        return self._loop.time() + self.wall_offset_s
