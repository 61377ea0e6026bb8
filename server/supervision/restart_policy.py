"""How soon to restart an engine that died, and when to stop trying. Knows no processes and no clock."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
MAX_DEATHS = 5
"""Within the window and with nothing delivered between them; one more ends the server."""

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 2.0


class RestartPolicy:
    """The last engines' ends."""

    def __init__(self) -> None:
        self._fruitless: deque[float] = deque()
        """When engines died since anything was delivered."""
        self._recent: deque[float] = deque()
        self._num_delivered = 0

    def died(self, now: float, num_delivered: int) -> float | None:
        """Seconds to wait before the next start; None where there is to be none.

        `num_delivered`: tokens and ends delivered to streams since the server started.
        """
        if num_delivered > self._num_delivered:
            self._num_delivered = num_delivered
            self._fruitless.clear()
        for times in (self._fruitless, self._recent):
            times.append(now)
            while now - times[0] > WINDOW_S:
                times.popleft()
        if len(self._fruitless) > MAX_DEATHS:
            return None
        # The first costs nobody a wait; then twice as long each time where nothing was delivered, else a little longer.
        fruitless_s = _FIRST_DELAY_S * (2.0 ** (len(self._fruitless) - 1) - 1)
        return min(max(fruitless_s, _FIRST_DELAY_S * (len(self._recent) - 1) / 10), _MAX_DELAY_S)
