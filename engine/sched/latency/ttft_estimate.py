"""When a request that comes now would have its first token, and the refusal of one that would have it too late.

The queue model: what must be computed before it, at the pace of prompts beside the decodes of the moment; and where
slots or blocks are taken, as many ends of other requests as it takes, at the pace at which they ended lately. Of other
tenants only that comes before it whose turn does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from inferd.engine.api.wire.params import SchedulingParams
from inferd.engine.sched.entry import Entry
from inferd.engine.sched.fairness.fair import Shares
from inferd.engine.sched.fairness.queue import FairQueue
from inferd.engine.sched.latency.policy import Pace
from inferd.engine.sched.limits import Refusal

CODE = "rate_limit_exceeded"
_NUM_ENDS = 64
"""Ends that their pace is told from."""


class CompletionRate:
    """How fast requests end while others wait for that. Time in which nobody does is no pace."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=_NUM_ENDS)
        self._last_s: float | None = None
        """Of the newest end, where somebody waits since."""

    def add(self, at_s: float, *, is_awaited: bool) -> None:
        """`is_awaited`: somebody stands in the queue."""
        if is_awaited and self._last_s is not None:
            self._gaps_s.append(at_s - self._last_s)
        self._last_s = at_s if is_awaited else None

    def none_waits(self) -> None:
        """The last of the queue has given up."""
        self._last_s = None

    def seconds(self, num_ends: int) -> float:
        """That so many take; 0 where none is waited for, or nothing is known."""
        if num_ends <= 0 or not self._gaps_s:
            return 0.0
        return num_ends * sum(self._gaps_s) / len(self._gaps_s)


@dataclass(slots=True)
class Demand:
    """What stands in the queue or has begun, by tenant, as far as a request of one priority may have to wait for it."""

    num_tokens: dict[str, float]
    """Of prompts, not computed yet."""
    num_requests: dict[str, float]
    """In the queue."""

    @classmethod
    def of(cls, running: Iterable[Entry], waiting: FairQueue, scheduling: SchedulingParams) -> Demand:
        tokens: dict[str, float] = {}
        requests: dict[str, float] = {}
        for tenant, queue in waiting.by_tenant.items():
            tokens[tenant], requests[tenant] = queue.num_tokens, len(queue)
        own = waiting.by_tenant.get(scheduling.tenant)
        if own is not None:
            # Priorities order the requests of one tenant; another's are ahead whatever theirs.
            tokens[scheduling.tenant] = own.num_tokens_until(scheduling.priority)
        for entry in running:
            num_pending = entry.request.num_pending
            if num_pending > 1:
                tenant = entry.request.scheduling.tenant
                tokens[tenant] = tokens.get(tenant, 0) + num_pending
        return cls(tokens, requests)

    def ahead(self, shares: Shares, tenant: str, num_tokens: int) -> tuple[int, int]:
        """(tokens of prompts, requests) that come before one of `tenant` that has `num_tokens` to compute."""
        own_tokens, own_requests = self.num_tokens.pop(tenant, 0), self.num_requests.pop(tenant, 0)
        tokens = own_tokens + shares.ahead(tenant, own_tokens + num_tokens, self.num_tokens)
        # A turn is counted as one request here: how long others' are is not known better than the own one's length.
        requests = own_requests + shares.ahead(tenant, own_requests + 1, self.num_requests, in_tokens=False)
        return int(tokens), int(requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftEstimate:
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
