"""Plans one step: which requests get rows, how many tokens each row has, and which waiting requests start.

Decodes go first, then prompts in order, until the step's budget of tokens and time is used. Tenants take turns. Knows
no drafts, no results, and not what was launched before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from inferd.engine.cache.group import PrefixMatch
from inferd.engine.cache.prefix import GONE
from inferd.engine.cache.table import KVCache
from inferd.engine.sched.entry import Entry, State
from inferd.engine.sched.fairness.fair import Shares
from inferd.engine.sched.fairness.queue import FairQueue, SuspectQueue, num_to_clear
from inferd.engine.sched.latency.budget import StepBudget
from inferd.engine.sched.latency.policy import LatencyPolicy
from inferd.engine.sched.plan import Admission, Row, StateCopy, StepPlan, TableUpdate
from inferd.engine.sched.slot_table import SlotTable, Watermark
from inferd.engine.sched.stats import SchedulerStats


@dataclass(slots=True)
class PlanBuilder:
    """A step plan that is being built."""

    budget: StepBudget
    admissions: list[Admission] = field(default_factory=list)
    updates: list[TableUpdate] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    """Entry of each row."""
    state_loads: list[StateCopy] = field(default_factory=list)
    state_saves: list[StateCopy] = field(default_factory=list)

    def add(self, entry: Entry, num_tokens: int) -> None:
        request, slot = entry.request, entry.slot
        self._send_blocks(entry)
        start = request.scheduled
        self.budget.spend(start, num_tokens)
        if start < request.num_prompt <= start + num_tokens:
            target_s = request.scheduling.ttft_target_s
            if target_s is not None:
                self.budget.end_by(request.scheduling.arrival_s + target_s)
        self.rows.append(Row(slot, start, num_tokens, request.launch(num_tokens)))
        self.entries.append(entry)
        if entry.table.has_states:
            checkpoint_id = entry.table.leave_checkpoint(start + num_tokens, num_tokens)
            if checkpoint_id is not None:
                self.state_saves.append(StateCopy(slot, checkpoint_id))

    def add_drafts(self, index: int, draft_ids: tuple[int, ...] | None, num_drafts: int) -> None:
        """Let row number `index` verify drafts: these, or if None, those that the draft model makes. Its block table
        has the places."""
        entry, row = self.entries[index], self.rows[index]
        self._send_blocks(entry)
        self.budget.spend_drafts(num_drafts)
        entry.request.launch_drafts(num_drafts)
        row = row._replace(num_tokens=row.num_tokens + num_drafts)
        if draft_ids is None:
            row = row._replace(num_to_draft=num_drafts, draft_start=entry.draft_start)
        else:
            row = row._replace(draft_ids=draft_ids)
        self.rows[index] = row

    def _send_blocks(self, entry: Entry) -> None:
        if entry.table.has_unsent:
            for appended in entry.table.take_appended():
                self.updates.append(TableUpdate(entry.slot, *appended))

    def finish(self, step_id: int) -> StepPlan:
        return StepPlan(
            step_id,
            tuple(self.admissions),
            tuple(self.updates),
            tuple(self.rows),
            tuple(self.state_loads),
            tuple(self.state_saves),
        )


class StepPlanner:
    """Plans the steps of one scheduler."""

    def __init__(
        self,
        cache: KVCache,
        stats: SchedulerStats,
        latency: LatencyPolicy,
        shares: Shares,
        waiting: FairQueue,
        slots: SlotTable,
        suspects: SuspectQueue,
        watermark: Watermark,
    ) -> None:
        self._cache, self._stats, self._latency = cache, stats, latency
        self._shares, self._waiting, self._slots = shares, waiting, slots
        self._suspects, self._watermark = suspects, watermark

    def plan_suspect(self, suspect: Entry, now: float) -> PlanBuilder:
        """A step of this suspect, which runs alone. It has no rows if the suspect has nothing to compute yet."""
        builder = PlanBuilder(self._latency.for_step((), now))
        if suspect.state is not State.FINISHED and suspect.request.scheduled < num_to_clear(suspect.request):
            self._continue(suspect, suspect.request.num_pending, builder)
        return builder

    def plan(self, now: float) -> tuple[PlanBuilder, bool | None]:
        """A step of all requests but suspects. Also returns whether a request has, or waits with, more than one
        token to compute.

        If a suspect's turn has come, this is its first step, and None.
        """
        if self._suspects.is_due:
            # Without decodes, so without their TPOT targets: all other requests wait for the suspect.
            alone = PlanBuilder(self._latency.for_step((), now))
            if self._start_suspect(alone, now):
                return alone, None
        decodes: list[Entry] = []
        prompts: list[Entry] = []
        for entry in self._slots.running:
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
        return builder, bool(prompts or len(self._waiting))

    def _not_held(self, decodes: list[Entry], prompts: list[Entry], now: float) -> list[Entry]:
        """The decodes that do not wait. After an engine's death, streams that already go on wait a little, so that the
        last one goes on sooner. If the step ends later than a stream may wait, the stream is in it."""
        if not any(entry.request.num_output for entry in prompts):
            return decodes
        num_tokens = sum([entry.request.num_pending for entry in prompts]) + self._waiting.num_tokens
        ends_s = now + self._latency.launched_s + self._latency.prompts_s(num_tokens, prompts[0].request.scheduled)
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
        builder = PlanBuilder(self._latency.for_step(decodes, now))
        for entry in decodes if self._shares.has_one_tenant else self._shares.in_order(decodes):
            self._continue(entry, 1, builder)
        if len(builder.rows) < len(decodes):
            # An entry that is short of memory draws no token in this step. Its target must not slow down the entries
            # that will free memory for it.
            num_tokens, builder.budget = builder.budget.num_tokens, self._latency.for_step(builder.entries, now)
            builder.budget.num_tokens = num_tokens
        return builder

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
            self._stats.prefix_query_tokens += request.num_prompt
            self._stats.prefix_hit_tokens += min(num_cached, request.num_prompt)
            self._stats.prefix_stateless_tokens += max(0, min(match.num_known, request.num_prompt) - num_cached)
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
