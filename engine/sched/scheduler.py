"""Continuous batching: each step gives every request some of the tokens that it still has to compute.

`schedule` makes the next plan while an earlier one may still run; `apply` takes the results of plans in launch order.
Decodes go first, then prompts in order, until the step's budget of tokens and time is used. Tenants take turns. Pure:
no clock, no randomness, no tensors and no threads. Does not know why a generation ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from inferd.engine.cache.prefix import GONE
from inferd.engine.cache.table import KVCache, PrefixMatch
from inferd.engine.request import Request
from inferd.engine.sched.drafting import Drafting
from inferd.engine.sched.entry import NO_SLOT, Entry, State, order_key_of
from inferd.engine.sched.fairness.fair import Shares
from inferd.engine.sched.fairness.queue import FairQueue
from inferd.engine.sched.latency.forecast import Forecast
from inferd.engine.sched.latency.policy import LatencyPolicy, Pace, Timing
from inferd.engine.sched.latency.step_time import UNKNOWN, PriorCosts, StepLoad
from inferd.engine.sched.latency.ttft_estimate import too_late
from inferd.engine.sched.limits import Refusal, SchedulerConfig, check_fits
from inferd.engine.sched.plan import Admission, Row, RowResult, RowStatus, StateCopy, StepPlan, StepResult
from inferd.engine.sched.plan_builder import PlanBuilder
from inferd.engine.sched.shared_prefix import Branches, SharedPrefixGroups, prefix_key_of
from inferd.engine.sched.slot_table import SlotTable, Watermark
from inferd.engine.sched.suspects import SuspectQueue, num_to_clear
from inferd.engine.speculation.ports import MOST_DRAFTS, Guesser


class AppliedRow(NamedTuple):
    """A row whose result counts. If its status is not OK, the caller must finish the request."""

    request: Request
    row: Row
    result: RowResult


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_prompt_tokens: int = 0
    """Prompt positions computed, including those computed again after a preemption."""
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    """Hits of first admissions only: a resumed request that finds its own blocks is not counted."""
    prefix_stateless_tokens: int = 0
    """Prompt tokens whose KV first admissions found, with no recurrent state behind them."""
    num_shed: int = 0
    """Requests refused because their first token would have come too late."""
    num_draft_rows: int = 0
    """Rows with drafts."""
    num_drafts: int = 0
    accepted_drafts: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    """Accepted drafts, by their place in the row."""

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        self.num_draft_rows += 1
        self.num_drafts += num_drafts
        for place in range(num_accepted):
            self.accepted_drafts[place] += 1


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
        self._cache = cache
        self.latency = LatencyPolicy(config.max_num_batched_tokens, config.chunk_split, prior)
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
    def cache(self) -> KVCache:
        return self._cache

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
        check_fits(request, self.config.max_model_len, self._cache.max_tokens)
        scheduling, table = request.scheduling, self._cache.open(request)
        self._shares.arrive(scheduling.tenant, scheduling.weight, self._now if now is None else now)
        order_key = order_key_of(scheduling, self._num_added, self.config.ageing_s)
        entry = Entry(request, table, order_key, prefix_key=prefix_key_of(scheduling, table))
        try:
            self._estimate(entry, now)
        except Refusal:
            self._shares.leave(scheduling.tenant)
            self._cache.close(table)
            self.stats.num_shed += 1
            raise
        self._num_added += 1
        self._entries[request] = entry
        self._prefix_groups.add(entry)
        if self._branches is not None:
            self._branches.add(entry, self._cache.block_size)
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
        num_shared = entry.table.num_hittable * self._cache.block_size if group else 0
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
            builder = PlanBuilder(self.latency.for_step((), now))
            if suspect.state is not State.FINISHED and suspect.request.scheduled < num_to_clear(suspect.request):
                self._continue(suspect, suspect.request.num_pending, builder)
            has_prompts = None
        else:
            builder, has_prompts = self._schedule_others(now)
        if not builder.rows:
            return None
        plan = builder.finish(self._num_steps)
        self.latency.launched(plan.rows, has_prompts=has_prompts)
        self._num_steps += 1
        self._launched.append((plan, builder.entries))
        return plan

    def _schedule_others(self, now: float) -> tuple[PlanBuilder, bool | None]:
        """Plan a step of all requests but suspects. Also returns whether a request has, or waits with, more than one
        token to compute.

        If a suspect's turn has come, this is its first step, and None.
        """
        if self._suspects.is_due:
            # Without decodes, so without their TPOT targets: all other requests wait for the suspect.
            alone = PlanBuilder(self.latency.for_step((), now))
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
        not_held = self._not_held(decodes, prompts, now)
        builder = self._build_rows(not_held, prompts, now)
        if not builder.rows and len(not_held) < len(decodes):  # what the held ones wait for cannot go on either
            builder = self._build_rows(decodes, prompts, now)
        self._suspects.others_had_their_turn()
        if self._drafting is not None:
            self._drafting.add(builder, may_take_blocks=self._slots.claimant is None)
        return builder, bool(prompts or len(self._waiting))

    def _not_held(self, decodes: list[Entry], prompts: list[Entry], now: float) -> list[Entry]:
        """The decodes that do not wait. After an engine's death, streams that already go on wait a little, so that the
        last one goes on sooner. If the step ends later than a stream may wait, the stream is in it."""
        if not any(entry.request.num_output for entry in prompts):
            return decodes
        num_tokens = sum([entry.request.num_pending for entry in prompts]) + self._waiting.num_tokens
        ends_s = now + self.latency.launched_s + self.latency.prompts_s(num_tokens, prompts[0].request.scheduled)
        return [entry for entry in decodes if not entry.may_be_held(ends_s)]

    def _build_rows(self, decodes: list[Entry], prompts: list[Entry], now: float) -> PlanBuilder:
        """A step of these decodes and prompts, and of requests that start."""
        builder = self._build_decodes(decodes, now)
        # A due suspect that did not start waits for memory. No other request may take that memory first.
        may_start = not self._suspects.is_due
        if not self._shares.has_one_tenant:
            self._take_turns(prompts, builder, now, may_start=may_start)
        else:
            for entry in prompts:
                self._continue(entry, entry.request.num_pending, builder)
            if may_start:
                self._admit_waiting(builder, now)
        return builder

    def _build_decodes(self, decodes: list[Entry], now: float) -> PlanBuilder:
        """A step in which each of these draws its next token, if memory allows."""
        builder = PlanBuilder(self.latency.for_step(decodes, now))
        for entry in decodes if self._shares.has_one_tenant else self._shares.in_order(decodes):
            self._continue(entry, 1, builder)
        if len(builder.rows) < len(decodes):
            # An entry that is short of memory draws no token in this step. Its target must not slow down the entries
            # that will free memory for it.
            num_tokens, builder.budget = builder.budget.num_tokens, self.latency.for_step(builder.entries, now)
            builder.budget.num_tokens = num_tokens
        return builder

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
        self._cache.check()
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

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit_waiting(self, builder: PlanBuilder, now: float) -> None:
        while builder.budget.num_tokens > 0 and self._slots.free_slots:
            entry = self._waiting.first()
            if entry is None or not self._admit(entry, builder, now):
                return

    def _take_turns(self, prompts: list[Entry], builder: PlanBuilder, now: float, *, may_start: bool) -> None:
        """Give the rest of the step to tenants, least served first. Within a tenant, running prompts go before waiting
        ones.

        An entry for which others are preempted goes before all turns, and nothing starts until it has its blocks.
        Otherwise the preempted entry could take the same blocks back, for ever: it is not charged for what it computes
        again, so its tenant's turn would come each time.
        """
        num_charged = 0
        claimant = self._slots.claimant
        if claimant is not None and claimant in prompts:
            prompts = [entry for entry in prompts if entry is not claimant]
            self._continue(claimant, claimant.request.num_pending, builder)
            may_start = may_start and self._slots.claimant is None
        begun: dict[str, deque[Entry]] = {}
        for entry in prompts:
            begun.setdefault(entry.request.scheduling.tenant, deque()).append(entry)
        while True:
            # The decodes are charged at the first turn. While they were planned, no counter moved, so the order of
            # preemption stayed the same.
            for i in range(num_charged, len(builder.rows)):
                self._shares.charge(builder.entries[i], builder.rows[i])
            num_charged = len(builder.rows)
            if builder.budget.num_tokens == 0:
                return
            num_free = len(self._slots.free_slots) if may_start else 0
            tenant = self._shares.turn(begun, num_free)
            if tenant is None:
                return
            if tenant in begun:
                entry = begun[tenant].popleft()
                self._continue(entry, entry.request.num_pending, builder)
                if not begun[tenant]:
                    del begun[tenant]
                continue
            head = self._waiting.by_tenant[tenant].first()
            assert head is not None, "a tenant waits with nothing"
            # If it has no room, nothing else starts, so that the room stays free for it.
            may_start = self._admit(head, builder, now)

    def _admit(self, entry: Entry, builder: PlanBuilder, now: float) -> bool:
        """Start an entry, or set it aside to wait for another. False if it, and so all behind it, has to wait."""
        if self._watermark.is_short(entry, in_use=self._slots.in_use):
            return False
        match = entry.table.match()
        awaited = self._key_to_await(entry, match)
        if awaited is not None:
            self._waiting.remove(entry)
            entry.state = State.AWAITING_PREFIX
            self._slots.sharing.wait(entry, awaited)
            self._slots.sharing.want_checkpoint(awaited)
            return True
        if not builder.budget.chunk(match.num_tokens, entry.request.total - match.num_tokens):
            return False
        num_blocks = entry.table.num_free_needed(match, entry.request.total)
        if not self._watermark.has(entry, num_blocks, in_use=self._slots.in_use):
            return False
        admitted = entry.table.admit(match, entry.request.total)
        assert admitted
        self._waiting.remove(entry)
        self._start(entry, match, builder, now)
        return True

    def _key_to_await(self, entry: Entry, match: PrefixMatch) -> bytes | None:
        """Key of the last block that an entry should wait for, because another one computes it now; None if there is
        none. Known blocks with no state behind them may be computed again to leave one."""
        num_matched, num_known = len(match.nodes), match.num_known // self._cache.block_size
        firsts = (num_known, num_known - 1, num_matched) if num_known > num_matched else (num_matched,)
        for first in firsts:
            keys = entry.table.keys(first, entry.table.num_hittable)
            awaited = self._slots.sharing.key_to_await(entry, keys)
            if awaited is not None:
                return awaited
        return None

    def _start_suspect(self, builder: PlanBuilder, now: float) -> bool:
        """Admit the first suspect with all the memory that it needs alone. False if that is not free now."""
        assert not self._launched, "a suspect is not alone"
        entry = self._suspects.first()
        match, num_tokens = entry.table.match(), max(entry.request.total, num_to_clear(entry.request))
        num_needed = entry.table.num_free_to_end(match, num_tokens)
        reserve = self._watermark.reserve(in_use=self._slots.in_use)
        if not self._slots.free_slots or num_needed + reserve > self._cache.pool.num_free:
            return False
        admitted = entry.table.admit(match, num_tokens)
        assert admitted
        self._suspects.begin()
        self._start(entry, match, builder, now)
        return True

    def _start(self, entry: Entry, match: PrefixMatch, builder: PlanBuilder, now: float) -> None:
        request, num_cached = entry.request, match.num_tokens
        if request.num_cached_tokens is None and entry.table.takes_hits:
            self.stats.prefix_query_tokens += request.num_prompt
            self.stats.prefix_hit_tokens += min(num_cached, request.num_prompt)
            self.stats.prefix_stateless_tokens += max(0, min(match.num_known, request.num_prompt) - num_cached)
        request.admit(num_cached, now, match.num_known)
        entry.start_by_s, entry.draft_start = inf, 0
        self._slots.take(entry, num_cached)
        ids = tuple(request.ids)
        builder.admissions.append(Admission(entry.slot, request.request_id, ids, request.num_prompt, request.params))
        if match.checkpoint_id != GONE:
            builder.state_loads.append(StateCopy(entry.slot, match.checkpoint_id))
        builder.add(entry, entry.table.chunk(num_cached, builder.budget.chunk(num_cached, request.num_pending)))

    # -- running -----------------------------------------------------------------------------------------------------

    def _continue(self, entry: Entry, num_pending: int, builder: PlanBuilder) -> None:
        """Let a running entry compute as much as the budget allows, and as its blocks take if it gets no more."""
        num_tokens = builder.budget.chunk(entry.request.scheduled, num_pending)
        if num_tokens == 0 or entry.state is not State.RUNNING:
            return
        request, table = entry.request, entry.table
        num_tokens = table.chunk(request.scheduled, num_tokens)
        end = request.scheduled + num_tokens
        if end > table.capacity and not self._slots.grow(entry, end):
            num_tokens = table.capacity - request.scheduled  # what its own blocks still take
        if num_tokens > 0:
            builder.add(entry, num_tokens)

    # -- after a step ------------------------------------------------------------------------------------------------

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
