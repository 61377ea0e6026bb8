"""How long callbacks hold up the event loop: a timer that says by how much it came late.

While a callback runs, or a thread holds the interpreter, nobody is answered: every token of every stream is as late as
this. Knows nothing of what ran.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

INTERVAL_S = 0.05
"""What holds the loop for longer is seen, what is shorter perhaps; 20 beats a second take 0.01% of a core."""


class LoopProbe:
    """Beats in the running loop from `start` to `stop`."""

    def __init__(
        self,
        observe: Callable[[float], None],
        interval_s: float = INTERVAL_S,
        clocks: Sequence[Callable[[], float]] = (time.monotonic,),
    ) -> None:
        """`observe` is given the lateness of each beat, in seconds.

        Of several `clocks` the one that advanced least counts: beside one that stands still while this process has no
        processor, only what the process itself did is seen.
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
