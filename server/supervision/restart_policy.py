"""How soon to restart an engine that died, and when to stop trying. Knows no processes and no clock."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
MAX_DEATHS = 5
"""Most deaths within the window with no token delivered between them; one more ends the server."""

_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 2.0


class RestartPolicy:
    """Counts recent deaths of engines."""

    def __init__(self) -> None:
        self._fruitless: deque[float] = deque()
        """Times of deaths since the last token was delivered."""
        self._recent: deque[float] = deque()
        self._num_delivered = 0

    def died(self, now: float, num_delivered: int) -> float | None:
        """Seconds to wait before the next start; None if there should be none.

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
        # No wait after the first death. Then the wait doubles if nothing was delivered, and else grows a little.
        fruitless_s = _FIRST_DELAY_S * (2.0 ** (len(self._fruitless) - 1) - 1)
        return min(max(fruitless_s, _FIRST_DELAY_S * (len(self._recent) - 1) / 10), _MAX_DELAY_S)
