"""Measures how long callbacks block the event loop, by the lateness of a timer.

While a callback runs, or a thread holds the interpreter lock, every token of every stream waits. The probe does not
know what ran.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

INTERVAL_S = 0.05
"""Seconds between two ticks. A longer block is always seen, a shorter one only sometimes. 20 ticks a second take 0.01%
of a core."""


class LoopProbe:
    """A timer that ticks in the running loop from `start` to `stop`."""

    def __init__(
        self,
        observe: Callable[[float], None],
        interval_s: float = INTERVAL_S,
        clocks: Sequence[Callable[[], float]] = (time.monotonic,),
    ) -> None:
        """`observe` receives the lateness of each tick, in seconds.

        The clock that advanced least counts. With a second clock that stops while this process has no processor, the
        probe sees only what the process itself did.
        """
        self._observe, self._interval_s, self._clocks = observe, interval_s, clocks
        self._last: tuple[float, ...] = ()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._last = self._now()
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._beat)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _now(self) -> tuple[float, ...]:
        return tuple(clock() for clock in self._clocks)

    def _beat(self) -> None:
        passed_s = min(now - last for now, last in zip(self._now(), self._last, strict=True))
        self._observe(max(0.0, passed_s - self._interval_s))
        self.start()
