"""Estimates when a new request would have its first token, and refuses one that would have it too late.

The queue model has two parts. The first is the prompt tokens ahead, at the pace of prompts beside the current decodes.
The second, if slots or blocks are taken, is the wait for other requests to end, at their recent rate. Requests of other
tenants count only as far as their turn comes first.
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
"""Number of ends that the rate is computed from."""


class CompletionRate:
    """How fast requests end while others wait for it. Time in which none waits is not counted."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=_NUM_ENDS)
        self._last_s: float | None = None
        """Time of the newest end, if requests have waited since."""

    def add(self, at_s: float, *, is_awaited: bool) -> None:
        """Count an end. `is_awaited`: the queue is not empty."""
        if is_awaited and self._last_s is not None:
            self._gaps_s.append(at_s - self._last_s)
        self._last_s = at_s if is_awaited else None

    def none_waits(self) -> None:
        """The queue became empty without an end."""
        self._last_s = None

    def seconds(self, num_ends: int) -> float:
        """Seconds until `num_ends` requests end; 0 if none is waited for, or nothing is known."""
        if num_ends <= 0 or not self._gaps_s:
            return 0.0
        return num_ends * sum(self._gaps_s) / len(self._gaps_s)


@dataclass(slots=True)
class Demand:
    """Demand by tenant, queued or begun, as far as a request of one priority may have to wait for it."""

    num_tokens: dict[str, float]
    """Prompt tokens not computed yet."""
    num_requests: dict[str, float]
    """Requests in the queue."""

    @classmethod
    def of(cls, running: Iterable[Entry], waiting: FairQueue, scheduling: SchedulingParams) -> Demand:
        tokens: dict[str, float] = {}
        requests: dict[str, float] = {}
        for tenant, queue in waiting.by_tenant.items():
            tokens[tenant], requests[tenant] = queue.num_tokens, len(queue)
        own = waiting.by_tenant.get(scheduling.tenant)
        if own is not None:
            # Priorities order the requests of one tenant only. Those of another tenant may go first at any priority.
            tokens[scheduling.tenant] = own.num_tokens_until(scheduling.priority)
        for entry in running:
            num_pending = entry.request.num_pending
            if num_pending > 1:
                tenant = entry.request.scheduling.tenant
                tokens[tenant] = tokens.get(tenant, 0) + num_pending
        return cls(tokens, requests)

    def ahead(self, shares: Shares, tenant: str, num_tokens: int) -> tuple[int, int]:
        """(prompt tokens, requests) that come before a request of `tenant` with `num_tokens` to compute."""
        own_tokens, own_requests = self.num_tokens.pop(tenant, 0), self.num_requests.pop(tenant, 0)
        tokens = own_tokens + shares.ahead(tenant, own_tokens + num_tokens, self.num_tokens)
        # A turn is counted as one request here: the lengths of others' requests are not known better than the own
        # one's.
        requests = own_requests + shares.ahead(tenant, own_requests + 1, self.num_requests, in_tokens=False)
        return int(tokens), int(requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftEstimate:
    """The work and waits before a request's first token."""

    pace: Pace
    num_tokens: int
    """Its own tokens, without prefix hits."""
    num_ahead: int
    """Prompt tokens that are computed before its own."""
    launched_s: float
    slot_s: float
    """Seconds until a slot and blocks are free for it."""

    @property
    def own_s(self) -> float:
        """Seconds to its first token if no request were ahead."""
        return self.launched_s + self.pace.seconds(self.num_tokens, self.num_tokens // 2)

    @property
    def first_token_s(self) -> float:
        """Seconds from now to its first token."""
        prompts_s = self.pace.seconds(self.num_ahead + self.num_tokens, self.num_tokens // 2)
        return self.launched_s + max(self.slot_s, prompts_s)

    def check(self, target_s: float, left_s: float) -> None:
        """Raise `Refusal` if the first token would come later than `left_s` because of requests ahead.

        A request that is late with none ahead is accepted: it would be no earlier at any other time.
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
    """Refusal of a request that was accepted and whose turn did not come in time."""
    message = (
        f"the first token can no longer come within the target of {target_s:g} s: other requests took longer than "
        "expected; retry later, or ask for a longer target"
    )
    return Refusal(CODE, message, None, retry_after_s=target_s)
