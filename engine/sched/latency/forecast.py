"""Predicts when each waiting request will have its first token, so that a late one can be refused.

Reads the queue, the running requests and the step-time model, and changes none of them. `ttft_estimate` holds the
calculation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

from inferd.engine.request import Request
from inferd.engine.sched.entry import NO_SLOT, Entry, RunningSet
from inferd.engine.sched.fairness.fair import Shares
from inferd.engine.sched.fairness.queue import FairQueue
from inferd.engine.sched.latency.policy import LatencyPolicy, Pace
from inferd.engine.sched.latency.ttft_estimate import CompletionRate, Demand, TtftEstimate
from inferd.engine.sched.slot_table import Watermark


class Forecast:
    """Forecasts for the requests of one scheduler."""

    def __init__(
        self,
        latency: LatencyPolicy,
        shares: Shares,
        waiting: FairQueue,
        running: RunningSet,
        watermark: Watermark,
        free_slots: Collection[int],
    ) -> None:
        self.completion_rate = CompletionRate()
        self._latency, self._shares, self._waiting = latency, shares, waiting
        self._running, self._watermark, self._free_slots = running, watermark, free_slots

    def pace(self, depth: int = 0) -> Pace:
        """How fast prompts are computed now, `depth` tokens deep."""
        return self._latency.pace([entry for entry in self._running if entry.request.num_pending <= 1], depth)

    def ttft_estimate(self, request: Request, num_tokens: int, group: Iterable[Entry] = ()) -> TtftEstimate:
        """The estimate for a request with `num_tokens` to compute.

        Tokens that its `group` has yet to compute count as its own: one member computes most of the shared prompt, and
        no member is ahead of the others.
        """
        tenant = request.scheduling.tenant
        demand = Demand.of(self._running, self._waiting, request.scheduling)
        num_ahead, num_before = demand.ahead(self._shares, tenant, num_tokens)
        num_in_group = sum(
            [member.request.num_pending if member.slot != NO_SLOT else member.num_to_compute for member in group]
        )
        num_shared = min(num_ahead, num_in_group)
        num_ahead, num_tokens = num_ahead - num_shared, num_tokens + num_shared
        has_slot = self._shares.may_start(tenant, len(self._free_slots))
        is_short = not has_slot or self._watermark.is_awaited_by(self._waiting.first())
        return TtftEstimate(
            pace=self.pace(num_tokens // 2),
            num_tokens=num_tokens,
            num_ahead=num_ahead,
            launched_s=self._latency.launched_s,
            slot_s=self.completion_rate.seconds(num_before + 1) if is_short else 0.0,
        )

    def start_by(self, request: Request, own_s: float) -> float:
        """Latest start of a request that takes `own_s` to its first token, launched steps included; infinite without a
        target.

        A request that could not be in time even alone may start until its target has passed.
        """
        target_s = request.scheduling.ttft_target_s
        if target_s is None:
            return inf
        return request.scheduling.arrival_s + target_s - (own_s if own_s <= target_s else self._latency.launched_s)

    def is_late(self, entry: Entry, now: float) -> bool:
        """Whether an entry that had to start before `now` is really late. If not, its latest start is set anew."""
        num_tokens = entry.num_to_compute
        own_s = self._latency.launched_s + self.pace(num_tokens // 2).seconds(num_tokens, num_tokens // 2)
        start_by_s = self.start_by(entry.request, own_s)
        if start_by_s < now:
            return True
        entry.start_by_s = start_by_s
        return False
