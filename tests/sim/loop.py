"""An event loop in which time is a number: it jumps to the next timer as soon as nobody has anything to do.

No threads, no sockets, no waiting. What is ready runs in an order drawn by a seed, not in that of its coming: nothing
may rest on who is woken first. Where nobody is ready and no timer is set, everyone waits for ever: an error.
"""

from __future__ import annotations

import asyncio
from math import inf
from random import Random

from tests.sim.device import SimulationError

_START_S = 1000.0


class VirtualLoop(asyncio.BaseEventLoop):
    """`time()` is virtual seconds. One for each run."""

    def __init__(self, rng: Random, limit_s: float) -> None:
        """`limit_s`: virtual seconds after which something goes round in circles."""
        super().__init__()
        self._now, self._end = _START_S, _START_S + limit_s
        self._rng = rng
        self._selector = self

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[object]:
        """What the loop's base class asks of a selector, once a turn: wait for so long, or for ever (None)."""
        if timeout is None:
            raise SimulationError("everyone waits, and nothing will ever happen")
        self._now += timeout
        if self._now > self._end:
            self._end = inf  # what is left must be able to end
            raise SimulationError(f"it still goes on after {self._now - _START_S:.0f} s")
        self._rng.shuffle(self._ready)
        return []

    def _process_events(self, event_list: list[object]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody else could wake it."""


class Clocks:
    """Stands for the module `time` in what is simulated. The wall clock, which is right at first, jumps; the monotonic
    one is the loop's."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.wall_offset_s = 0.0

    def monotonic(self) -> float:
        return self._loop.time()

    def time(self) -> float:
        return self._loop.time() + self.wall_offset_s
