"""Continuous batching: each step gives every request some of the tokens that it still has to compute.

`schedule` makes the next plan while an earlier one may still run; `apply` takes the results of plans in launch order.
`step_planner` decides which requests are in a plan. Pure: no clock, no randomness, no tensors and no threads. Does not
know why a generation ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.engine.sched.drafting import Drafting
from inferd.engine.sched.entry import NO_SLOT, Entry, State, order_key_of
from inferd.engine.sched.fairness.fair import Shares
from inferd.engine.sched.fairness.queue import FairQueue, SuspectQueue
from inferd.engine.sched.latency.forecast import Forecast
from inferd.engine.sched.latency.policy import LatencyPolicy, Pace, Timing
from inferd.engine.sched.latency.step_time import UNKNOWN, PriorCosts, StepLoad
from inferd.engine.sched.latency.ttft_estimate import too_late
from inferd.engine.sched.limits import Refusal, SchedulerConfig, check_fits
from inferd.engine.sched.plan import Row, RowResult, RowStatus, StepPlan, StepResult
from inferd.engine.sched.shared_prefix import Branches, SharedPrefixGroups, prefix_key_of
from inferd.engine.sched.slot_table import SlotTable, Watermark
from inferd.engine.sched.stats import SchedulerStats
from inferd.engine.sched.step_planner import StepPlanner
from inferd.engine.speculation.ports import Guesser


class AppliedRow(NamedTuple):
    """A row whose result counts. If its status is not OK, the caller must finish the request."""

    request: Request
    row: Row
    result: RowResult


class Scheduler:
    """Owns every accepted request from `add` until its last launched row is applied."""

    def __init__(
        self, config: SchedulerConfig, cache: KVCache, prior: PriorCosts = UNKNOWN, guesser: Guesser | None = None
    ) -> None:
        """`prior`: expected cost of steps before any was measured. If it has costs of drafted steps, the worker has a
        draft model. `guesser`: guesses tokens for rows to verify."""
        if cache.has_windows:
            assert config.max_num_batched_tokens <= cache.step_tokens, "steps carry more than the cache counts with"
        self.config = config
        self.stats = SchedulerStats()
        self.cache = cache
        self.latency = LatencyPolicy(
            config.max_num_batched_tokens, config.chunk_split, prior, keeps_prompts_whole=config.keeps_prompts_whole
        )
        self._drafting = None
        if guesser is not None:
            self._drafting = Drafting(
                guesser,
                self.latency.model,
                config.max_draws,
                config.max_num_batched_tokens,
                drafts_follow=config.drafts_follow,
            )
        self._now = 0.0
        """Time at which the newest step was planned."""
        self._entries: dict[Request, Entry] = {}
        self._shares = Shares()
        self._waiting = FairQueue(self._shares)
        self._slots = SlotTable(config.max_num_seqs, cache, self._shares, self._waiting)
        self._running = self._slots.running
        self._prefix_groups = SharedPrefixGroups()
        self._branches = None if cache.states is None else Branches()
        self._suspects = SuspectQueue()
        self._launched: deque[tuple[StepPlan, list[Entry]]] = deque()
        self._num_added = 0
        self._num_steps = 0
        watermark = Watermark(cache.pool, config.watermark)
        self._planner = StepPlanner(
            cache, self.stats, self.latency, self._shares, self._waiting, self._slots, self._suspects, watermark
        )
        self._forecast = Forecast(
            self.latency, self._shares, self._waiting, self._running, watermark, self._slots.free_slots
        )

    # -- what the caller may ask ------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests accepted and not running, preempted ones included."""
        return len(self._entries) - len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._entries or self._launched)

    @property
    def free_slots(self) -> tuple[int, ...]:
        """Slots that no request holds and no launched row uses."""
        return tuple(self._slots.free_slots)

    @property
    def num_preemptions(self) -> int:
        return self._slots.num_preemptions

    @property
    def num_tokens_waiting(self) -> int:
        """Prompt tokens of the requests in the queue."""
        return self._waiting.num_tokens

    def prefill_pace(self) -> Pace:
        """Speed at which prompts are computed now."""
        return self._forecast.pace()

    def add(self, request: Request, now: float | None = None) -> None:
        """Queue a request. Raises `Refusal` if it can never fit. If `now` is given, also raises it if the first token
        would miss its target."""
        check_fits(request, self.config.max_model_len, self.cache.max_tokens)
        scheduling, table = request.scheduling, self.cache.open(request)
        self._shares.arrive(scheduling.tenant, scheduling.weight, self._now if now is None else now)
        order_key = order_key_of(scheduling, self._num_added, self.config.ageing_s)
        entry = Entry(request, table, order_key, prefix_key=prefix_key_of(scheduling, table))
        try:
            self._estimate(entry, now)
        except Refusal:
            self._shares.leave(scheduling.tenant)
            self.cache.close(table)
            self.stats.num_shed += 1
            raise
        self._num_added += 1
        self._entries[request] = entry
        self._prefix_groups.add(entry)
        if self._branches is not None:
            self._branches.add(entry, self.cache.block_size)
        self.latency.num_timed += scheduling.has_target
        if scheduling.alone_until:
            self._suspects.add(entry)
        else:
            self._waiting.push(entry)

    def _estimate(self, entry: Entry, now: float | None) -> None:
        """Set how much an entry will have to compute, and by when it has to start. Raises `Refusal` if it would be
        late."""
        request, group = entry.request, self._prefix_groups.of(entry.prefix_key)
        scheduling, target_s = request.scheduling, request.scheduling.ttft_target_s
        num_shared = entry.table.num_hittable * self.cache.block_size if group else 0
        entry.num_to_compute = request.total - num_shared
        if target_s is None:
            return
        if not group:
            entry.num_to_compute -= entry.table.match().num_tokens
        if request.num_output:
            return  # a replay: its first token was drawn already
        estimate = self._forecast.ttft_estimate(request, entry.num_to_compute, group)
        if now is not None and not scheduling.alone_until:
            estimate.check(target_s, scheduling.arrival_s + target_s - now)
        entry.start_by_s = self._forecast.start_by(request, estimate.own_s)

    def shed(self, now: float) -> Iterator[tuple[Request, Refusal]]:
        """Remove and yield waiting requests that can no longer make their TTFT target, even if they were next.

        A request that could not have made it even alone stays until the target has passed. If only one request is left,
        it is served late: at any other time it would be no earlier.
        """
        while (entry := self._waiting.overdue(now)) is not None:
            if len(self._entries) == 1 and not self._launched:
                return
            if self._forecast.is_late(entry, now):
                self.finish(entry.request)
                self.stats.num_shed += 1
                target_s = entry.request.scheduling.ttft_target_s
                assert target_s is not None, "no target to be late for"
                yield entry.request, too_late(target_s)

    def finish(self, request: Request, *, forget_blocks: bool = False) -> None:
        """End a request, for whatever reason. Results of its launched rows are discarded; its slot and blocks are freed
        after them.

        `forget_blocks` removes its blocks from the prefix index, because their content cannot be trusted.
        """
        entry = self._entries.pop(request)
        if self._drafting is not None:
            self._drafting.ended(request)
        self._prefix_groups.remove(entry)
        if self._branches is not None:
            self._branches.remove(entry)
        self._shares.leave(request.scheduling.tenant)
        self.latency.num_timed -= request.scheduling.has_target
        if entry.state is State.RUNNING:
            self._forecast.completion_rate.add(self._now, is_awaited=len(self._waiting) > 0)
        if forget_blocks:
            entry.table.forget()
        self._suspects.forget(entry)
        match entry.state:
            case State.WAITING:
                self._waiting.remove(entry)
                if not len(self._waiting):
                    self._forecast.completion_rate.none_waits()
            case State.AWAITING_PREFIX:
                self._slots.sharing.stop_waiting(entry)
            case State.RUNNING:
                self._slots.stop_running(entry)
        self._slots.retire(entry)

    @property
    def awaits_results(self) -> bool:
        """Whether the next step is better planned when all launched ones are applied: rows verify drafts, or should."""
        if self._drafting is None or not self._launched:
            return False
        plan, _ = self._launched[-1]
        return plan.has_drafts or self._drafting.is_worth_a_wait(self._running, StepLoad.of(plan.rows))

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run before a launched step is applied."""
        suspect = self._suspects.current()
        if suspect is None and self._suspects.is_due and self._launched:
            return None
        self._now = self._shares.now_s = now
        if suspect is not None:
            builder, has_prompts = self._planner.plan_suspect(suspect, now), None
        else:
            builder, has_prompts = self._planner.plan(now)
        if self._drafting is not None and has_prompts is not None:
            self._drafting.add(builder, may_take_blocks=self._slots.claimant is None)
        if not builder.rows:
            return None
        plan = builder.finish(self.number_step())
        self.latency.launched(plan.rows, has_prompts=has_prompts)
        self._launched.append((plan, builder.entries))
        return plan

    def number_step(self) -> int:
        """The id of the next plan, the scheduler's or another's: a worker gets them in their order."""
        self._num_steps += 1
        return self._num_steps - 1

    def apply(self, result: StepResult, timing: Timing | None = None) -> list[AppliedRow]:
        """Take the results of the oldest plan not yet applied. Returns the rows of requests that have not ended, in
        order.

        Without `timing`, the step-time model learns nothing.
        """
        plan, entries = self._launched.popleft()
        self.latency.applied(timing)
        assert result.step_id == plan.step_id, f"step {result.step_id} applied, {plan.step_id} is next"
        if plan.has_drafts and timing is not None and self._drafting is not None:
            num_given = sum([len(row_result.token_ids) for row_result in result.rows])
            self._drafting.applied(plan.rows, num_given, timing)
        applied: list[AppliedRow] = []
        for entry, row, row_result in zip(entries, plan.rows, result.rows, strict=True):
            request = entry.request
            request.in_flight -= 1
            if entry.state is State.FINISHED:
                self._slots.drain(entry)
                continue
            applied.append(AppliedRow(request, row, row_result))
            if row_result.status is RowStatus.OK:
                self._apply_row(entry, row, row_result)
            if timing is not None and row.samples and entry.first_token_s is None:
                entry.first_token_s, entry.first_output = timing.ended_s, request.num_output
        return applied

    def check(self) -> None:
        """Prove that queue, running set, slots, tables and pool agree. Raises `AssertionError`."""
        self.cache.check()
        self._slots.check(self.config.max_num_seqs)
        self._suspects.check()
        states = [entry.state for entry in self._entries.values()]
        assert all(entry.state is State.WAITING for entry in self._waiting.entries())
        assert states.count(State.WAITING) == len(self._waiting)
        assert states.count(State.AWAITING_PREFIX) == self._slots.sharing.num_waiting
        assert states.count(State.SUSPECT) == self._suspects.num_waiting
        assert states.count(State.RUNNING) == len(self._running)
        self._waiting.check()
        if self._branches is not None:
            self._branches.check(self._entries.values())
        self._shares.check(self._entries.values(), self._running)
        for entry in self._entries.values():
            entry.request.check()
            assert (entry.slot == NO_SLOT) == (entry.state in (State.WAITING, State.AWAITING_PREFIX, State.SUSPECT))
            assert (entry.table.capacity == 0) == (entry.slot == NO_SLOT)

    def _apply_row(self, entry: Entry, row: Row, result: RowResult) -> None:
        request = entry.request
        request.apply(row.start, row.num_tokens, result.token_ids)
        if row.num_drafts:
            num_accepted = len(result.token_ids) - 1
            self.stats.count_drafts(row.num_drafts, num_accepted)
            if row.num_to_draft:
                entry.draft_start = row.start + min(num_accepted + 1, row.num_to_draft)
                assert entry.draft_counts is not None
                entry.draft_counts.newest = row.num_to_draft, num_accepted
            if not self._shares.has_one_tenant:
                self._shares.charge_accepted(entry, row)
        if row.start < request.num_prompt:
            self.stats.num_prompt_tokens += min(row.start + row.num_tokens, request.num_prompt) - row.start
        self._slots.has_computed(entry)
        if entry.state is State.PREEMPTED:
            self._slots.drain(entry)
