"""Continuous batching: each step gives every request some of the tokens it has yet to catch up with.

`schedule` makes the next plan while an earlier one may still run, `apply` takes a plan's results in launch order.
Decodes go first, then prompts by rank, as far as the step's budget reaches, in tokens and in time; tenants take turns.
Pure: no clock, no randomness, no tensors, no threads, and no knowledge of why a generation ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.engine.sched.entry import NO_SLOT, Entry, State, rank_of
from inferd.engine.sched.fairness.fair import Shares
from inferd.engine.sched.fairness.queue import FairQueue
from inferd.engine.sched.latency.forecast import Forecast
from inferd.engine.sched.latency.policy import LatencyPolicy, Pace, Timing
from inferd.engine.sched.latency.step_time import UNKNOWN, Seed
from inferd.engine.sched.latency.ttft_estimate import too_late
from inferd.engine.sched.limits import Refusal, SchedulerConfig, check_fits
from inferd.engine.sched.plan import Admission, Row, RowResult, RowStatus, StepPlan, StepResult
from inferd.engine.sched.plan_builder import PlanDraft
from inferd.engine.sched.shared_prefix import SharedPrefixGroups, prefix_key_of
from inferd.engine.sched.slots import SlotTable
from inferd.engine.sched.suspects import SuspectQueue, goal_of
from inferd.engine.sched.watermark import Watermark


class AppliedRow(NamedTuple):
    """A row whose results count. After a status other than OK the caller must finish the request."""

    request: Request
    row: Row
    result: RowResult


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_prompt_tokens: int = 0
    """Prompt positions computed, those computed again after a preemption included."""
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    """Of first admissions: a resumed request that finds its own blocks is no hit."""
    num_shed: int = 0
    """Requests refused because their first token would have come too late."""


class Scheduler:
    """Owns every accepted request from `add` until its last launched row is applied."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, seed: Seed = UNKNOWN) -> None:
        """`seed`: what steps cost before any was measured."""
        if cache.has_windows:
            assert config.max_num_batched_tokens <= cache.step_tokens, "steps carry more than the cache counts with"
        self.config = config
        self.stats = SchedulerStats()
        self._cache = cache
        self.latency = LatencyPolicy(config.max_num_batched_tokens, config.chunk_split, seed)
        self._now = 0.0
        """When the newest step was planned."""
        self._entries: dict[Request, Entry] = {}
        self._shares = Shares()
        self._waiting = FairQueue(self._shares)
        self._slots = SlotTable(config.max_num_seqs, cache, self._shares, self._waiting)
        self._running = self._slots.running
        self._prefix_groups = SharedPrefixGroups()
        self._suspects = SuspectQueue()
        self._launched: deque[tuple[StepPlan, list[Entry]]] = deque()
        self._num_added = 0
        self._num_steps = 0
        self._watermark = Watermark(cache.pool, config.watermark)
        self._forecast = Forecast(
            self.latency, self._shares, self._waiting, self._running, self._watermark, self._slots.free_slots
        )

    # -- what the caller may ask ------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Accepted and not running, preempted ones included."""
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
    def cache(self) -> KVCache:
        return self._cache

    @property
    def num_tokens_waiting(self) -> int:
        """Tokens of prompts that the queue holds."""
        return self._waiting.num_tokens

    def prefill_pace(self) -> Pace:
        """How fast prompts are computed now."""
        return self._forecast.pace()

    def add(self, request: Request, now: float | None = None) -> None:
        """Queue a request. Raises `Refusal` for one that can never fit, and at `now` for one whose first token would
        come later than its target says."""
        check_fits(request, self.config.max_model_len, self._cache.max_tokens)
        scheduling, table = request.scheduling, self._cache.open(request)
        self._shares.arrive(scheduling.tenant, scheduling.weight, self._now if now is None else now)
        rank = rank_of(scheduling, self._num_added, self.config.ageing_s)
        entry = Entry(request, table, rank, prefix_key=prefix_key_of(scheduling, table))
        try:
            self._expect(entry, now)
        except Refusal:
            self._shares.leave(scheduling.tenant)
            self._cache.close(table)
            self.stats.num_shed += 1
            raise
        self._num_added += 1
        self._entries[request] = entry
        self._prefix_groups.add(entry)
        self.latency.num_timed += scheduling.has_target
        if scheduling.alone_until:
            self._suspects.add(entry)
        else:
            self._waiting.push(entry)

    def _expect(self, entry: Entry, now: float | None) -> None:
        """How much an entry will have to compute, and by when it has to start."""
        request, group = entry.request, self._prefix_groups.of(entry.prefix_key)
        scheduling, target_s = request.scheduling, request.scheduling.ttft_target_s
        num_shared = entry.table.num_hittable * self._cache.block_size if group else 0
        entry.num_to_compute = request.total - num_shared
        if target_s is None:
            return
        if not group:
            entry.num_to_compute -= entry.table.match().num_tokens
        if request.num_output:
            return  # a replay: its first token was in time, or was not
        estimate = self._forecast.ttft_estimate(request, entry.num_to_compute, group)
        if now is not None and not scheduling.alone_until:
            estimate.check(target_s, scheduling.arrival_s + target_s - now)
        entry.start_by_s = self._forecast.start_by(request, estimate.own_s)

    def shed(self, now: float) -> Iterator[tuple[Request, Refusal]]:
        """Take the requests that nothing was done for and that can no longer make their TTFT target, even if they were
        next; one that could not have made it alone goes on until the target has passed. Who has the machine to itself
        is served, late: it would be no earlier at any other time."""
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
        """The request is over, for whatever reason. What it launched is discarded; what it holds returns after that.

        `forget_blocks` takes its blocks out of the prefix index: their content is not to be trusted.
        """
        entry = self._entries.pop(request)
        self._prefix_groups.remove(entry)
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
            case State.FOLLOWING:
                self._slots.sharing.unfollow(entry)
            case State.RUNNING:
                self._slots.stop_running(entry)
        self._slots.retire(entry)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None where nothing can run before a launched step is applied."""
        suspect = self._suspects.current()
        if suspect is None and self._suspects.is_due and self._launched:
            return None
        self._now = self._shares.now_s = now
        if suspect is not None:
            draft = PlanDraft(self.latency.for_step((), now))
            if suspect.state is not State.FINISHED and suspect.request.scheduled < goal_of(suspect.request):
                self._continue(suspect, suspect.request.num_pending, draft)
            has_prompts = None
        else:
            draft, has_prompts = self._schedule_others(now)
        if not draft.rows:
            return None
        plan = draft.finish(self._num_steps)
        self.latency.launched(plan.rows, has_prompts=has_prompts)
        self._num_steps += 1
        self._launched.append((plan, draft.entries))
        return plan

    def _schedule_others(self, now: float) -> tuple[PlanDraft, bool | None]:
        """A step of everybody, and whether a request has more than one token to compute, or waits to.

        If a suspect's turn has come, its first step and None.
        """
        if self._suspects.is_due:
            # Nobody's pace is kept: all others wait for it.
            alone = PlanDraft(self.latency.for_step((), now))
            if self._start_suspect(alone, now):
                return alone, None
        decodes: list[Entry] = []
        prompts: list[Entry] = []
        for entry in self._running:
            num_pending = entry.request.num_pending
            if num_pending == 1:
                decodes.append(entry)
            elif num_pending > 1:
                prompts.append(entry)
        draft = self._draft_decodes(decodes, now)
        # A suspect that is due and did not start waits for memory: nobody may take it first.
        may_start = not self._suspects.is_due
        if not self._shares.is_one:
            self._take_turns(prompts, draft, now, may_start=may_start)
        else:
            for entry in prompts:
                self._continue(entry, entry.request.num_pending, draft)
            if may_start:
                self._admit_waiting(draft, now)
        self._suspects.others_had_their_turn()
        return draft, bool(prompts or len(self._waiting))

    def _draft_decodes(self, decodes: list[Entry], now: float) -> PlanDraft:
        """A step in which each of these has its next token, where memory allows."""
        draft = PlanDraft(self.latency.for_step(decodes, now))
        for entry in decodes if self._shares.is_one else self._shares.in_order(decodes):
            self._continue(entry, 1, draft)
        if len(draft.rows) < len(decodes):
            # Who is short of memory has no token by this step, and does not hold up those who are to free some.
            num_tokens, draft.budget = draft.budget.num_tokens, self.latency.for_step(draft.entries, now)
            draft.budget.num_tokens = num_tokens
        return draft

    def apply(self, result: StepResult, timing: Timing | None = None) -> list[AppliedRow]:
        """Take the results of the oldest plan not yet applied; returns the rows whose request is not over, in order.

        Without `timing` nothing is learned of how long steps take.
        """
        plan, entries = self._launched.popleft()
        self.latency.applied(timing)
        assert result.step_id == plan.step_id, f"step {result.step_id} applied, {plan.step_id} is next"
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
        """Queue, running set, slots, tables and pool agree. Raises `AssertionError`."""
        self._cache.check()
        self._slots.check(self.config.max_num_seqs)
        self._suspects.check()
        states = [entry.state for entry in self._entries.values()]
        assert all(entry.state is State.WAITING for entry in self._waiting.entries())
        assert states.count(State.WAITING) == len(self._waiting)
        assert states.count(State.FOLLOWING) == self._slots.sharing.num_following
        assert states.count(State.SUSPECT) == self._suspects.num_waiting
        assert states.count(State.RUNNING) == len(self._running)
        self._waiting.check()
        self._shares.check(self._entries.values(), self._running)
        for entry in self._entries.values():
            entry.request.check()
            assert (entry.slot == NO_SLOT) == (entry.state in (State.WAITING, State.FOLLOWING, State.SUSPECT))
            assert (entry.table.capacity == 0) == (entry.slot == NO_SLOT)

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit_waiting(self, draft: PlanDraft, now: float) -> None:
        while draft.budget.num_tokens > 0 and self._slots.free_slots:
            entry = self._waiting.first()
            if entry is None or not self._admit(entry, draft, now):
                return

    def _take_turns(self, prompts: list[Entry], draft: PlanDraft, now: float, *, may_start: bool) -> None:
        """Give the rest of the step to tenants by what they were given so far: to each, what runs before what waits.

        An entry for which others give back blocks goes before all turns, and until it has them nothing starts. Else the
        one that gave way could start again with the blocks that it gave, for ever: what it computes again is not
        charged, so that its tenant's turn would come each time.
        """
        num_charged = 0
        claimant = self._slots.claimant
        if claimant is not None and claimant in prompts:
            prompts.remove(claimant)
            self._continue(claimant, claimant.request.num_pending, draft)
            may_start = may_start and self._slots.claimant is None
        begun: dict[str, deque[Entry]] = {}
        for entry in prompts:
            begun.setdefault(entry.request.scheduling.tenant, deque()).append(entry)
        while True:
            # The decodes' at first: while they were planned no counter moved, nor who gives way to whom.
            for i in range(num_charged, len(draft.rows)):
                self._shares.charge(draft.entries[i], draft.rows[i])
            num_charged = len(draft.rows)
            if draft.budget.num_tokens == 0:
                return
            num_free = len(self._slots.free_slots) if may_start else 0
            tenant = self._shares.turn(begun, num_free)
            if tenant is None:
                return
            if tenant in begun:
                entry = begun[tenant].popleft()
                self._continue(entry, entry.request.num_pending, draft)
                if not begun[tenant]:
                    del begun[tenant]
                continue
            head = self._waiting.by_tenant[tenant].first()
            assert head is not None, "a tenant waits with nothing"
            # Who has no room keeps it free: nobody else starts before it.
            may_start = self._admit(head, draft, now)

    def _admit(self, entry: Entry, draft: PlanDraft, now: float) -> bool:
        """Start an entry, or set it aside to follow another. False where it has to wait, and all behind it."""
        if self._watermark.is_short(entry, is_shared=self._slots.is_shared):
            return False
        match = entry.table.match()
        awaited = self._slots.sharing.key_to_await(entry, entry.table.keys(len(match.nodes), entry.table.num_hittable))
        if awaited is not None:
            self._waiting.remove(entry)
            entry.state = State.FOLLOWING
            self._slots.sharing.follow(entry, awaited)
            return True
        if not draft.budget.chunk(match.num_tokens, entry.request.total - match.num_tokens):
            return False
        num_blocks = entry.table.num_free_needed(match, entry.request.total)
        if not self._watermark.has(entry, num_blocks, is_shared=self._slots.is_shared):
            return False
        admitted = entry.table.admit(match, entry.request.total)
        assert admitted
        self._waiting.remove(entry)
        self._start(entry, match.num_tokens, draft, now)
        return True

    def _start_suspect(self, draft: PlanDraft, now: float) -> bool:
        """Admit the first suspect with all the memory that it takes alone; False where it is not to be had now."""
        assert not self._launched, "a suspect is not alone"
        entry = self._suspects.first()
        match, num_tokens = entry.table.match(), max(entry.request.total, goal_of(entry.request))
        num_free = self._cache.pool.num_free
        reserve = self._watermark.reserve(is_shared=self._slots.is_shared)
        if not self._slots.free_slots or entry.table.num_free_needed(match, num_tokens) + reserve > num_free:
            return False
        admitted = entry.table.admit(match, num_tokens)
        assert admitted
        self._suspects.begin()
        self._start(entry, match.num_tokens, draft, now)
        return True

    def _start(self, entry: Entry, num_cached: int, draft: PlanDraft, now: float) -> None:
        request = entry.request
        if request.num_cached_tokens is None and entry.table.takes_hits:
            self.stats.prefix_query_tokens += request.num_prompt
            self.stats.prefix_hit_tokens += min(num_cached, request.num_prompt)
        request.admit(num_cached, now)
        entry.start_by_s = inf
        self._slots.take(entry, num_cached)
        ids = tuple(request.ids)
        draft.admissions.append(Admission(entry.slot, request.request_id, ids, request.num_prompt, request.params))
        draft.add(entry, draft.budget.chunk(num_cached, request.num_pending))

    # -- running -----------------------------------------------------------------------------------------------------

    def _continue(self, entry: Entry, num_pending: int, draft: PlanDraft) -> None:
        """Let a running entry catch up as far as the budget goes; not at all where memory is short."""
        num_tokens = draft.budget.chunk(entry.request.scheduled, num_pending)
        if num_tokens == 0 or entry.state is not State.RUNNING:
            return
        end = entry.request.scheduled + num_tokens
        if end <= entry.table.capacity or self._slots.grow(entry, end):
            draft.add(entry, num_tokens)

    # -- after a step ------------------------------------------------------------------------------------------------

    def _apply_row(self, entry: Entry, row: Row, result: RowResult) -> None:
        request = entry.request
        request.apply(row.start, row.num_tokens, result.token_ids)
        if row.start < request.num_prompt:
            self.stats.num_prompt_tokens += min(row.start + row.num_tokens, request.num_prompt) - row.start
        self._slots.has_computed(entry)
        if entry.state is State.PREEMPTED:
            self._slots.drain(entry)
