"""Planted bugs of what drafts may take: blocks, time, turns, and places in a step. See `tests.sim.planting`."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from inferd.engine.cache.table import BlockTable
from inferd.engine.request import Request
from inferd.engine.sched import drafting as drafting_module
from inferd.engine.sched.drafting import Drafting
from inferd.engine.sched.entry import Entry
from inferd.engine.sched.fairness.fair import Shares
from inferd.engine.sched.latency.budget import TimedBudget
from inferd.engine.sched.plan import Row, RowResult, StateCopy
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.sched.slot_table import SlotTable
from inferd.engine.sched.step_planner import PlanBuilder, StepPlanner
from tests.sim.oracle import next_state
from tests.sim.planting import Patch, Plants
from tests.sim.states import States

plant = Plants()


# -- blocks ------------------------------------------------------------------------------------------------------------


@plant
def rejected_positions_are_indexed(patch: Patch) -> None:
    """False hit: a block is indexed whose last position holds the KV of a rejected draft."""
    has_computed = SlotTable.has_computed
    drafting: set[Request] = set()
    apply = Request.apply

    def noted(self: Request, start: int, num_tokens: int, token_ids: tuple[int, ...]) -> None:
        if len(token_ids) < num_tokens:
            drafting.add(self)
        apply(self, start, num_tokens, token_ids)

    def eager(self: SlotTable, entry: Entry) -> None:
        has_computed(self, entry)
        if entry.request in drafting:
            drafting.remove(entry.request)
            entry.table._index(min(len(entry.request.ids), entry.table.capacity))

    patch.setattr(Request, "apply", noted)
    patch.setattr(SlotTable, "has_computed", eager)


@plant
def window_moves_on_for_rejected_drafts(patch: Patch) -> None:
    """Early free: blocks that the last draft does not see are freed, and the next query sees them."""
    apply_row = Scheduler._apply_row

    def early(self: Scheduler, entry: Entry, row: Row, result: RowResult) -> None:
        apply_row(self, entry, row, result)
        if row.num_drafts and entry.table.capacity:
            for group in entry.table._groups.windowed:
                for block_id in group.take_dead(row.start + row.num_tokens, entry.table._cache.block_size):
                    entry.table._cache.pool.release(block_id)

    patch.setattr(Scheduler, "_apply_row", early)


@plant
def blocks_behind_the_accepted_drafts_are_given_back(patch: Patch) -> None:
    """Early free: the last block holds a token that was accepted, and is given back with those of rejected drafts."""
    apply_row = Scheduler._apply_row

    def trim(self: Scheduler, entry: Entry, row: Row, result: RowResult) -> None:
        apply_row(self, entry, row, result)
        cache, num_kept = entry.table._cache, entry.request.computed // entry.table._cache.block_size
        if len(result.token_ids) <= row.num_drafts and entry.table.capacity and num_kept:
            for group in entry.table._groups:
                for block_id in group.blocks[max(num_kept, group.first) :]:
                    cache.pool.release(block_id)
                del group.blocks[max(num_kept, group.first) :]
            entry.table.capacity = num_kept * cache.block_size

    patch.setattr(Scheduler, "_apply_row", trim)


@plant
def shared_blocks_are_given_back_with_rejected_drafts(patch: Patch) -> None:
    """Double free: a block of the prefix, which others hold too, loses a reference with each rejection."""
    apply_row = Scheduler._apply_row

    def loose(self: Scheduler, entry: Entry, row: Row, result: RowResult) -> None:
        apply_row(self, entry, row, result)
        pool = entry.table._cache.pool
        if len(result.token_ids) <= row.num_drafts:
            shared = [block_id for block_id in entry.table._groups[0].held if pool._num_refs[block_id] > 1]
            if shared:
                pool.release(shared[0])

    patch.setattr(Scheduler, "_apply_row", loose)


@plant
def blocks_of_drafts_are_not_sent(patch: Patch) -> None:
    """The worker learns of a block that drafts took only with the next row."""
    send = PlanBuilder._send_blocks

    def once(self: PlanBuilder, entry: Entry) -> None:
        if entry not in self.entries:
            send(self, entry)

    patch.setattr(PlanBuilder, "_send_blocks", once)


@plant
def blocks_of_drafts_are_sent_for_the_next_entry(patch: Patch) -> None:
    """Off by one: the table of the worker has a hole before the blocks that drafts took."""
    add_drafts = PlanBuilder.add_drafts

    def shifted(self: PlanBuilder, index: int, draft_ids: tuple[int, ...] | None, num_drafts: int) -> None:
        num_before = len(self.updates)
        add_drafts(self, index, draft_ids, num_drafts)
        self.updates[num_before:] = [update._replace(first=update.first + 1) for update in self.updates[num_before:]]

    patch.setattr(PlanBuilder, "add_drafts", shifted)


@plant
def drafts_have_no_places(patch: Patch) -> None:
    """Drafts are added to a row whose blocks do not hold them."""
    patch.setattr(drafting_module, "_with_places", lambda entry, first, num_drafts, may_take_blocks: num_drafts)


@plant
def others_are_preempted_for_drafts(patch: Patch) -> None:
    """Guesses take the memory of requests that were to draw."""
    schedulers: list[Scheduler] = []
    created = Scheduler.__init__

    def create(self: Scheduler, *args: object, **kwargs: object) -> None:
        created(self, *args, **kwargs)  # type: ignore[arg-type]
        schedulers[:] = [self]

    def greedy(entry: Entry, first: int, num_drafts: int, may_take_blocks: bool) -> int:
        if num_drafts and first + num_drafts > entry.table.capacity:
            schedulers[0]._slots.grow(entry, first + num_drafts)
        return max(0, min(num_drafts, entry.table.capacity - first))

    patch.setattr(Scheduler, "__init__", create)
    patch.setattr(drafting_module, "_with_places", greedy)


# -- what a step may carry ---------------------------------------------------------------------------------------------


@plant
def drafts_are_no_draws(patch: Patch) -> None:
    """A step draws more tokens than the worker has logits for."""
    created = Drafting.__init__

    def unbounded(self: Drafting, guesser: Any, model: Any, most_draws: int, most_tokens: int, **rest: Any) -> None:
        created(self, guesser, model, 1 << 20, most_tokens, **rest)

    patch.setattr(Drafting, "__init__", unbounded)


@plant
def guesses_are_not_cut(patch: Patch) -> None:
    """A row carries more drafts than kernels have forms for, and than the context has places."""
    candidate_of = Drafting._candidate

    def uncut(self: Drafting, row: int, context: int, entry: Entry, costs: Any, num_drawn: int) -> Any:
        guess = self._guesser.guess(entry.request)
        return candidate_of(self, row, context, entry, costs, num_drawn)._replace(ids=guess.ids, odds=guess.odds)

    patch.setattr(Drafting, "_candidate", uncut)


@plant
def drafts_take_the_time_of_targets(patch: Patch) -> None:
    """A step takes longer than its tightest TPOT target, for guesses."""
    patch.setattr(TimedBudget, "seconds_left", property(lambda self: inf))


@plant
def rejected_drafts_are_charged(patch: Patch) -> None:
    """A tenant loses turns for tokens that its requests were not given."""

    def charge(self: Shares, entry: Entry, row: Row) -> None:
        entry.num_charged = max(entry.num_charged, row.start + 1 + row.num_draws)

    patch.setattr(Shares, "charge_accepted", charge)


# -- the draft model --------------------------------------------------------------------------------------------------


@plant
def draft_model_keeps_rejected_drafts(patch: Patch) -> None:
    """Its KV of rejected drafts counts as that of the tokens that were drawn instead."""
    apply_row = Scheduler._apply_row

    def keep(self: Scheduler, entry: Entry, row: Row, result: RowResult) -> None:
        apply_row(self, entry, row, result)
        if row.num_to_draft and entry.slot >= 0:
            entry.draft_start = row.start + row.num_to_draft

    patch.setattr(Scheduler, "_apply_row", keep)


@plant
def draft_model_lacks_the_last_accepted_draft(patch: Patch) -> None:
    """Off by one: the last draft of a row that was accepted as a whole counts as computed."""
    apply_row = Scheduler._apply_row

    def late(self: Scheduler, entry: Entry, row: Row, result: RowResult) -> None:
        apply_row(self, entry, row, result)
        if row.num_to_draft and entry.slot >= 0:
            entry.draft_start = entry.request.computed

    patch.setattr(Scheduler, "_apply_row", late)


def _start_drafting_at(patch: Patch, first: Callable[[Entry, int], int]) -> None:
    """`first`: from the entry and its position before it began."""
    begin = StepPlanner._start

    def wrong(self: StepPlanner, entry: Entry, *rest: Any) -> None:
        before = entry.draft_start
        begin(self, entry, *rest)
        entry.draft_start = first(entry, before)

    patch.setattr(StepPlanner, "_start", wrong)


@plant
def prefix_hits_count_as_computed_by_the_draft_model(patch: Patch) -> None:
    """Cached blocks hold nothing of the draft model unless a request drafted in them."""
    _start_drafting_at(patch, lambda entry, before: entry.request.cached)


@plant
def draft_model_remembers_blocks_given_back(patch: Patch) -> None:
    """A preempted request comes back to other blocks."""
    _start_drafting_at(patch, lambda entry, before: before)


# -- recurrent states --------------------------------------------------------------------------------------------------


@plant
def rejected_drafts_advance_the_state(patch: Patch) -> None:
    """The worker leaves the state behind all drafts of a row."""
    patch.setattr(States, "accepted", lambda self, states, first, accepted, end: states[end])


@plant
def accepted_drafts_do_not_advance_the_state(patch: Patch) -> None:
    """The worker leaves the state before the drafts of a row."""
    patch.setattr(States, "accepted", lambda self, states, first, accepted, end: states[first])


@plant
def accepted_drafts_advance_the_state_twice(patch: Patch) -> None:
    """The worker applies accepted drafts to the state behind them."""

    def twice(self: States, states: dict[int, int], first: int, accepted: int, end: int) -> int:
        return states[accepted] if accepted == first else next_state(states[accepted], states[accepted])

    patch.setattr(States, "accepted", twice)


@plant
def checkpoint_is_left_behind_drafts(patch: Patch) -> None:
    """Wrong boundary: a row with drafts saves a checkpoint for its end, and its state is the one before them."""
    add_drafts = PlanBuilder.add_drafts
    patch.setattr(BlockTable, "most_drafts", lambda self, num_before: 1 << 62)

    def saved(self: PlanBuilder, index: int, draft_ids: tuple[int, ...] | None, num_drafts: int) -> None:
        add_drafts(self, index, draft_ids, num_drafts)
        entry, row = self.entries[index], self.rows[index]
        checkpoint_id = entry.table.leave_checkpoint(row.start + row.num_tokens, 1)
        if checkpoint_id is not None:
            self.state_saves[:] = [copy for copy in self.state_saves if copy.slot != row.slot]
            self.state_saves.append(StateCopy(row.slot, checkpoint_id))

    patch.setattr(PlanBuilder, "add_drafts", saved)
