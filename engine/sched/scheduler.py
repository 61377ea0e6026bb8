"""Continuous batching: each step gives every request some of the tokens it has yet to catch up with.

`schedule` makes the next plan while an earlier one may still run, `apply` takes a plan's results in launch order.
Decodes go first, then prompts by rank, as far as the step's budget reaches, in tokens and in time; tenants take turns.
Pure: no clock, no randomness, no tensors, no threads, and no knowledge of why a generation ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.engine.sched.draft import PlanDraft
from inferd.engine.sched.entry import NO_SLOT, Entry, State, rank_of
from inferd.engine.sched.fair import Shares
from inferd.engine.sched.latency import LatencyPolicy, Pace, Timing
from inferd.engine.sched.limits import Refusal, SchedulerConfig, check_fits
from inferd.engine.sched.outlook import Demand, Ends, Outlook, too_late
from inferd.engine.sched.plan import Admission, Row, RowResult, RowStatus, StepPlan, StepResult
from inferd.engine.sched.preempt import RunningSet
from inferd.engine.sched.queue import FairQueue
from inferd.engine.sched.room import Room
from inferd.engine.sched.sharing import PrefixSharing
from inferd.engine.sched.step_time import UNKNOWN, Seed
from inferd.engine.sched.trial import Trials, goal_of


class AppliedRow(NamedTuple):
    """A row whose results count. After a status other than OK the caller must finish the request."""

    request: Request
    row: Row
    result: RowResult


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_preemptions: int = 0
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
        self._ends = Ends()
        self._now = 0.0
        """When the newest step was planned."""
        self._entries: dict[Request, Entry] = {}
        self._shares = Shares()
        self._waiting = FairQueue(self._shares)
        self._running = RunningSet()
        self._draining: set[Entry] = set()
        """Preempted and finished entries with launched rows."""
        self._sharing = PrefixSharing()
        self._trials = Trials()
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._launched: deque[tuple[StepPlan, list[Entry]]] = deque()
        self._num_added = 0
        self._num_steps = 0
        self._room = Room(cache.pool, config.watermark)

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
        return tuple(self._free_slots)

    @property
    def cache(self) -> KVCache:
        return self._cache

    @property
    def num_tokens_waiting(self) -> int:
        """Tokens of prompts that the queue holds."""
        return self._waiting.num_tokens()

    def add(self, request: Request, now: float | None = None) -> None:
        """Queue a request. Raises `Refusal` for one that can never fit, and at `now` for one whose first token would
        come later than its target says."""
        check_fits(request, self.config.max_model_len, self._cache.max_tokens)
        table = self._cache.open(request)
        self._shares.arrive(request.tenant, request.weight, self._waiting.tenants, self._now if now is None else now)
        num_to_compute, prefill_s = request.total, 0.0
        if request.ttft_target_s is not None:
            num_to_compute -= table.match().num_tokens
            outlook = self._outlook(request, num_to_compute)
            prefill_s = outlook.own_s
            if now is not None and not request.num_output and not request.alone_until:
                try:
                    outlook.check(request.ttft_target_s, request.arrival_s + request.ttft_target_s - now)
                except Refusal:
                    self._shares.leave(request.tenant)
                    self._cache.close(table)
                    self.stats.num_shed += 1
                    raise
        rank = rank_of(request, self._num_added, self.config.ageing_s, prefill_s)
        self._num_added += 1
        entry = Entry(request, table, rank, num_to_compute=num_to_compute)
        self._entries[request] = entry
        self.latency.num_paced += request.tpot_target_s is not None
        if request.alone_until:
            self._trials.add(entry)
        else:
            self._waiting.push(entry)

    def shed(self, now: float) -> Iterator[tuple[Request, Refusal]]:
        """Take the requests at the heads of the queues that nothing was done for and that can no longer make their TTFT
        target; one that could not have made it alone goes on."""
        for entry in self._waiting.heads():
            request, target_s = entry.request, entry.request.ttft_target_s
            if target_s is None or request.num_output or request.num_cached_tokens is not None:
                continue
            if now + self.latency.launched_s < request.arrival_s + target_s:
                own_s = self._outlook(request, entry.num_to_compute).own_s
                if now + own_s <= request.arrival_s + target_s or own_s > target_s:
                    continue
            self.finish(request)
            self.stats.num_shed += 1
            yield request, too_late(target_s)

    def finish(self, request: Request, *, forget_blocks: bool = False) -> None:
        """The request is over, for whatever reason. What it launched is discarded; what it holds returns after that.

        `forget_blocks` takes its blocks out of the prefix index: their content is not to be trusted.
        """
        entry = self._entries.pop(request)
        self._shares.leave(request.tenant)
        self.latency.num_paced -= request.tpot_target_s is not None
        if entry.state is State.RUNNING:
            self._ends.add(self._now, is_awaited=len(self._waiting) > 0)
        if forget_blocks:
            entry.table.forget()
        self._trials.forget(entry)
        match entry.state:
            case State.WAITING:
                self._waiting.remove(entry)
                if not len(self._waiting):
                    self._ends.none_waits()
            case State.FOLLOWING:
                self._sharing.unfollow(entry)
            case State.RUNNING:
                self._stop_running(entry)
        entry.state = State.FINISHED
        if request.in_flight == 0:
            self._draining.discard(entry)
            self._close(entry)
        else:
            self._draining.add(entry)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None where nothing can run before a launched step is applied."""
        suspect = self._trials.current()
        if suspect is None and self._trials.is_due and self._launched:
            return None
        self._now = self._shares.now_s = now
        if suspect is not None:
            draft = PlanDraft(self.latency.for_step((), now))
            if suspect.request.scheduled < goal_of(suspect.request):
                self._continue(suspect, suspect.request.num_pending, draft)
            has_prompts = True
        else:
            draft, has_prompts = self._schedule_others(now)
        if not draft.rows:
            return None
        plan = draft.finish(self._num_steps)
        self.latency.launched(plan.rows, has_prompts=has_prompts)
        self._num_steps += 1
        self._launched.append((plan, draft.entries))
        return plan

    def _schedule_others(self, now: float) -> tuple[PlanDraft, bool]:
        """A suspect's first step where its turn has come, else one of everybody; whether someone had more than one
        token to compute, or waits to."""
        if self._trials.is_due:
            # Nobody's pace is kept: all others wait for it.
            trial = PlanDraft(self.latency.for_step((), now))
            if self._start_trial(trial, now):
                return trial, True
        decodes: list[Entry] = []
        prompts: list[tuple[Entry, int]] = []
        for entry in self._running:
            num_pending = entry.request.num_pending
            if num_pending == 1:
                decodes.append(entry)
            elif num_pending > 1:
                prompts.append((entry, num_pending))
        draft = PlanDraft(self.latency.for_step(decodes, now))
        for entry in decodes if self._shares.is_one else self._shares.in_order(decodes):
            self._continue(entry, 1, draft)
        if len(draft.rows) < len(decodes):
            # Who is short of memory has no token by this step, and does not hold up those who are to free some.
            num_tokens, draft.budget = draft.budget.num_tokens, self.latency.for_step(draft.entries, now)
            draft.budget.num_tokens = num_tokens
        # A suspect that is due and did not start waits for memory: nobody may take it first.
        may_start = not self._trials.is_due
        if not self._shares.is_one:
            self._take_turns(prompts, draft, now, may_start=may_start)
        else:
            for entry, num_pending in prompts:
                self._continue(entry, num_pending, draft)
            if may_start:
                self._admit_waiting(draft, now)
        self._trials.others_had_their_turn()
        return draft, bool(prompts or len(self._waiting))

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
                self._drain(entry)
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
        self._sharing.check()
        self._trials.check()
        states = [entry.state for entry in self._entries.values()]
        assert all(entry.state is State.WAITING for entry in self._waiting.entries())
        assert states.count(State.WAITING) == len(self._waiting)
        assert states.count(State.FOLLOWING) == self._sharing.num_following
        assert states.count(State.SUSPECT) == self._trials.num_waiting
        assert [entry.state for entry in self._running] == [State.RUNNING] * states.count(State.RUNNING)
        self._shares.check(self._entries.values(), self._running)
        seated = [*self._running, *self._draining]
        slots = [entry.slot for entry in seated] + self._free_slots
        assert sorted(slots) == list(range(self.config.max_num_seqs)), f"slots {slots}"
        assert all(entry.request.in_flight > 0 for entry in self._draining)
        for entry in self._entries.values():
            entry.request.check()
            assert (entry.slot == NO_SLOT) == (entry.state in (State.WAITING, State.FOLLOWING, State.SUSPECT))
            assert (entry.table.capacity == 0) == (entry.slot == NO_SLOT)

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit_waiting(self, draft: PlanDraft, now: float) -> None:
        while draft.budget.num_tokens > 0 and self._free_slots:
            entry = self._waiting.first()
            if entry is None or not self._admit(entry, draft, now):
                return

    def _take_turns(self, prompts: list[tuple[Entry, int]], draft: PlanDraft, now: float, *, may_start: bool) -> None:
        """Give the rest of the step to tenants by what they were given so far: to each, what runs before what waits."""
        num_charged = 0
        begun: dict[str, deque[tuple[Entry, int]]] = {}
        for entry, num_pending in prompts:
            begun.setdefault(entry.request.tenant, deque()).append((entry, num_pending))
        while True:
            # The decodes' at first: while they were planned no counter moved, nor who gives way to whom.
            for i in range(num_charged, len(draft.rows)):
                self._shares.charge(draft.entries[i], draft.rows[i])
            num_charged = len(draft.rows)
            if draft.budget.num_tokens == 0:
                return
            num_free = len(self._free_slots) if may_start else 0
            heads = {name: entries[0][0] for name, entries in begun.items()}
            tenant = self._shares.turn(heads, self._waiting.tenants, num_free)
            if tenant is None:
                return
            if tenant in begun:
                self._continue(*begun[tenant].popleft(), draft)
                if not begun[tenant]:
                    del begun[tenant]
                continue
            head = self._waiting.of(tenant).first()
            assert head is not None, "a tenant waits with nothing"
            # Who has no room keeps it free: nobody else starts before it.
            may_start = self._admit(head, draft, now)

    def _admit(self, entry: Entry, draft: PlanDraft, now: float) -> bool:
        """Start an entry, or set it aside to follow another. False where it has to wait, and all behind it."""
        if self._room.is_short(entry, is_shared=self._is_shared):
            return False
        match = entry.table.match()
        awaited = self._sharing.key_to_await(entry, entry.table.keys(len(match.nodes), entry.table.num_hittable))
        if awaited is not None:
            self._waiting.remove(entry)
            entry.state = State.FOLLOWING
            self._sharing.follow(entry, awaited)
            return True
        if not draft.budget.chunk(match.num_tokens, entry.request.total - match.num_tokens):
            return False
        num_blocks = entry.table.num_free_needed(match, entry.request.total)
        if not self._room.has(entry, num_blocks, is_shared=self._is_shared):
            return False
        admitted = entry.table.admit(match, entry.request.total)
        assert admitted
        self._waiting.remove(entry)
        self._start(entry, match.num_tokens, draft, now)
        return True

    def _start_trial(self, draft: PlanDraft, now: float) -> bool:
        """Admit the first suspect with all the memory that its trial takes; False where it is not to be had now."""
        assert not self._launched, "a suspect is not alone"
        entry = self._trials.first()
        match, num_tokens = entry.table.match(), max(entry.request.total, goal_of(entry.request))
        num_free = self._cache.pool.num_free
        reserve = self._room.reserve(is_shared=self._is_shared)
        if not self._free_slots or entry.table.num_free_needed(match, num_tokens) + reserve > num_free:
            return False
        admitted = entry.table.admit(match, num_tokens)
        assert admitted
        self._trials.begin()
        self._start(entry, match.num_tokens, draft, now)
        return True

    @property
    def _is_shared(self) -> bool:
        """Whether somebody holds blocks, and may need more."""
        return bool(len(self._running) or self._draining)

    def _start(self, entry: Entry, num_cached: int, draft: PlanDraft, now: float) -> None:
        request = entry.request
        if request.num_cached_tokens is None and entry.table.takes_hits:
            self.stats.prefix_query_tokens += request.num_prompt
            self.stats.prefix_hit_tokens += min(num_cached, request.num_prompt)
        request.admit(num_cached, now)
        entry.state, entry.slot = State.RUNNING, self._free_slots.pop()
        self._running.add(entry)
        self._shares.runs(request.tenant, 1)
        if self._cache.shares_prefixes:
            first_own = num_cached // self._cache.block_size
            own_keys = entry.table.keys(first_own, entry.table.num_full)
            self._sharing.lead(entry, own_keys, num_cached, self._cache.block_size)
        ids = tuple(request.ids)
        draft.admissions.append(Admission(entry.slot, request.request_id, ids, request.num_prompt, request.params))
        draft.add(entry, draft.budget.chunk(num_cached, request.num_pending))

    def prefill_pace(self) -> Pace:
        """How fast prompts are computed now."""
        return self.latency.pace([entry for entry in self._running if entry.request.num_pending <= 1], 0)

    def _outlook(self, request: Request, num_tokens: int) -> Outlook:
        """Of a request with `num_tokens` to compute, as things stand."""
        decodes = [entry for entry in self._running if entry.request.num_pending <= 1]
        demand = Demand.of(self._running, self._waiting, request)
        num_ahead, num_before = demand.ahead(self._shares, request.tenant, num_tokens)
        has_slot = self._shares.may_start(request.tenant, len(self._free_slots))
        is_short = not has_slot or self._room.is_awaited_by(self._waiting.first())
        return Outlook(
            pace=self.latency.pace(decodes, num_tokens // 2),
            num_tokens=num_tokens,
            num_ahead=num_ahead,
            launched_s=self.latency.launched_s,
            slot_s=self._ends.seconds(num_before + 1) if is_short else 0.0,
        )

    # -- running -----------------------------------------------------------------------------------------------------

    def _continue(self, entry: Entry, num_pending: int, draft: PlanDraft) -> None:
        """Let a running entry catch up as far as the budget goes; not at all where memory is short."""
        num_tokens = draft.budget.chunk(entry.request.scheduled, num_pending)
        if num_tokens == 0 or entry.state is not State.RUNNING:
            return
        end = entry.request.scheduled + num_tokens
        if end <= entry.table.capacity or self._grow(entry, end):
            draft.add(entry, num_tokens)

    def _grow(self, entry: Entry, num_tokens: int) -> bool:
        """Extend the table, at the cost of those that rank behind.

        False where nobody does, and where blocks are about to return anyway: those of an entry that drains, of a victim
        that is done as soon as its launched row is, or those that die with the entry's own launched rows.
        """
        request, table = entry.request, entry.table
        while not table.extend(num_tokens):
            victim = self._victim(entry)
            if victim is None or self._draining or victim.request.num_pending == 0:
                return False
            if request.in_flight and table.can_extend_after(request.scheduled, num_tokens):
                return False
            self._preempt(victim)
        return True

    def _victim(self, entry: Entry) -> Entry | None:
        if self._shares.is_one:
            return self._running.victim(entry)
        return self._shares.victim(self._running, entry)

    def _preempt(self, entry: Entry) -> None:
        """Take a running entry off; it is computed again, from its ids, when it is admitted again."""
        self.stats.num_preemptions += 1
        self._stop_running(entry)
        entry.state = State.PREEMPTED
        if entry.request.in_flight:
            self._draining.add(entry)
        else:
            self._requeue(entry)

    def _stop_running(self, entry: Entry) -> None:
        self._running.remove(entry)
        self._shares.runs(entry.request.tenant, -1)
        self._wake(self._sharing.leave(entry))

    def _wake(self, followers: list[Entry]) -> None:
        for follower in followers:
            follower.state = State.WAITING
            self._waiting.push(follower)

    # -- after a step ------------------------------------------------------------------------------------------------

    def _apply_row(self, entry: Entry, row: Row, result: RowResult) -> None:
        request = entry.request
        request.apply(row.start, row.num_tokens, result.token_ids)
        entry.table.commit(request.computed)
        if row.start < request.num_prompt:
            self.stats.num_prompt_tokens += min(row.start + row.num_tokens, request.num_prompt) - row.start
        if entry.leading:
            self._wake(self._sharing.advance(entry, request.computed))
        if entry.state is State.PREEMPTED:
            self._drain(entry)

    def _drain(self, entry: Entry) -> None:
        """One row fewer in flight of an entry that no longer runs: with the last, its slot and blocks return."""
        if entry.request.in_flight:
            return
        self._draining.remove(entry)
        if entry.state is State.PREEMPTED:
            self._requeue(entry)
        else:
            self._close(entry)

    def _requeue(self, entry: Entry) -> None:
        self._give_back(entry)
        entry.request.rewind()
        entry.num_to_compute = entry.request.total
        entry.state = State.WAITING
        self._waiting.push(entry)

    def _give_back(self, entry: Entry) -> None:
        """Slot and blocks, where it has any: nothing launched can touch them any more."""
        entry.table.release()
        if entry.slot != NO_SLOT:
            self._free_slots.append(entry.slot)
            entry.slot = NO_SLOT

    def _close(self, entry: Entry) -> None:
        self._give_back(entry)
        self._cache.close(entry.table)
