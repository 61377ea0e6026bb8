"""When a request that comes now would have its first token, and the refusal of one that would have it too late.

The queue model: what must be computed before it, at the pace of prompts beside the decodes of the moment; and where
slots or blocks are taken, as many ends of other requests as it takes, at the pace at which they ended lately. Knows
no entries: the scheduler counts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from inferd.engine.sched.latency import Pace
from inferd.engine.sched.limits import Refusal

CODE = "rate_limit_exceeded"
_NUM_ENDS = 64
"""Ends that their pace is told from."""


class Ends:
    """How fast requests end."""

    def __init__(self) -> None:
        self._at_s: deque[float] = deque(maxlen=_NUM_ENDS)

    def add(self, at_s: float) -> None:
        self._at_s.append(at_s)

    def seconds(self, num_ends: int) -> float:
        """That so many take; 0 where none is waited for, or nothing is known."""
        if num_ends <= 0 or len(self._at_s) < 2:
            return 0.0
        return num_ends * (self._at_s[-1] - self._at_s[0]) / (len(self._at_s) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What stands before a request's first token."""

    pace: Pace
    num_tokens: int
    """Its own that no prefix hit spares it."""
    num_ahead: int
    """Tokens of prompts that are computed before."""
    launched_s: float
    slot_s: float
    """Until there is a slot, and blocks, for it."""

    @property
    def own_s(self) -> float:
        """With nobody ahead."""
        return self.launched_s + self.pace.seconds(self.num_tokens, self.num_tokens // 2)

    @property
    def first_token_s(self) -> float:
        """From now on."""
        prompts_s = self.pace.seconds(self.num_ahead + self.num_tokens, self.num_tokens // 2)
        return self.launched_s + max(self.slot_s, prompts_s)

    def check(self, target_s: float, left_s: float) -> None:
        """Raise `Refusal` where the first token would come later than `left_s` because of those ahead.

        A request that is late with nobody ahead is taken: it would be no earlier at any other time.
        """
        expected_s = self.first_token_s
        if expected_s <= left_s or (self.num_ahead == 0 and self.slot_s == 0.0):
            return
        message = (
            f"the first token would come in about {expected_s:.2g} s, and the target of {target_s:g} s leaves "
            f"{max(left_s, 0.0):.2g} s: {self.num_ahead} prompt tokens are ahead, computed at "
            f"{self.pace.tokens_per_s:.0f} a second; retry later, or ask for a longer target"
        )
        raise Refusal(CODE, message, None, retry_after_s=max(expected_s - left_s, 0.0))


def too_late(target_s: float) -> Refusal:
    """Of a request that was accepted, and whose turn has not come in time."""
    message = (
        f"the first token can no longer come within the target of {target_s:g} s: others took longer than expected"
    )
    return Refusal(CODE, f"{message}; retry later, or ask for a longer target", None, retry_after_s=target_s)
