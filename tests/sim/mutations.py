"""Bugs that serving engines have shipped, planted one at a time. Each must be caught by the simulation.

A mutation patches one method of the product through pytest's `monkeypatch`; the class of bug is in its docstring. A new
promise of scheduler or cache deserves a new mutation here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from inferd.engine.api.messages import Delta, WireLogprobs
from inferd.engine.cache.pool import BlockPool
from inferd.engine.cache.prefix import Node, PrefixIndex
from inferd.engine.cache.table import BlockTable, KVCache, PrefixMatch
from inferd.engine.core import EngineCore
from inferd.engine.generation import Generation, wire_logprobs
from inferd.engine.request import Request
from inferd.engine.sched import latency as latency_module
from inferd.engine.sched import scheduler as scheduler_module
from inferd.engine.sched.budget import StepBudget, TimedBudget
from inferd.engine.sched.draft import PlanDraft
from inferd.engine.sched.entry import NO_SLOT, Entry, Rank, State
from inferd.engine.sched.latency import LatencyPolicy, Timing
from inferd.engine.sched.limits import Refusal
from inferd.engine.sched.outlook import too_late
from inferd.engine.sched.plan import StepPlan, StepResult, TokenMasks
from inferd.engine.sched.preempt import RunningSet
from inferd.engine.sched.scheduler import AppliedRow, Scheduler
from inferd.engine.sched.sharing import PrefixSharing
from inferd.engine.sched.step_time import StepLoad
from inferd.engine.sched.trial import Trials
from tests.sim.grammar import SimulatedGrammars

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
MUTATIONS: list[Mutation] = []


def mutation(plant: Mutation) -> Mutation:
    MUTATIONS.append(plant)
    return plant


# -- blocks ------------------------------------------------------------------------------------------------------------


@mutation
def blocks_returned_while_a_row_is_in_flight(patch: Patch) -> None:
    """Early free: a finished request gives its blocks back though a launched step still reads and writes them."""
    finish = Scheduler.finish

    def early(self: Scheduler, request: Request, *, forget_blocks: bool = False) -> None:
        entry = self._entries[request]
        finish(self, request, forget_blocks=forget_blocks)
        entry.table.release()

    patch.setattr(Scheduler, "finish", early)


@mutation
def block_freed_twice(patch: Patch) -> None:
    """Double free: the last reference puts a block on the free list twice."""
    release = BlockPool.release

    def twice(self: BlockPool, block_id: int) -> None:
        release(self, block_id)
        if block_id in self._empty[-1:]:
            self._empty.append(block_id)

    patch.setattr(BlockPool, "release", twice)


@mutation
def hit_takes_no_reference(patch: Patch) -> None:
    """Skipped reference count: a prefix hit shares a block without holding it."""
    hold, release = BlockPool.hold, BlockPool.release

    def no_reference(self: BlockPool, block_id: int) -> None:
        hold(self, block_id)
        if self._num_refs[block_id] > 1:
            self._num_refs[block_id] -= 1

    def tolerant(self: BlockPool, block_id: int) -> None:
        if self._num_refs[block_id]:
            release(self, block_id)

    patch.setattr(BlockPool, "hold", no_reference)
    patch.setattr(BlockPool, "release", tolerant)


@mutation
def evicted_block_stays_indexed(patch: Patch) -> None:
    """A cached block is given away and its content can still be hit."""

    def forget(self: KVCache, block_id: int) -> None:
        self.pool.clear_content(block_id)

    patch.setattr(KVCache, "forget", forget)


@mutation
def held_descendants_of_an_evicted_block_stay_indexed(patch: Patch) -> None:
    """Eviction forgets one node and leaves what lies behind it, whose chain now has a hole."""

    def drop_node(self: PrefixIndex, node: Node) -> list[int]:
        del self._by_key[node.key]
        node.is_live = False
        return [block_id for block_id in node.block_ids if self._by_block.pop(block_id, None)]

    patch.setattr(PrefixIndex, "drop_node", drop_node)


@mutation
def last_partial_block_not_counted(patch: Patch) -> None:
    """Off by one at a block's edge: the last, partly filled block is not allocated."""
    patch.setattr(KVCache, "num_blocks_for", lambda self, num_tokens: max(1, num_tokens // self.block_size))


@mutation
def table_grows_one_token_late(patch: Patch) -> None:
    """Off by one at a block's edge: a full table takes one more token."""
    extend = BlockTable.extend
    patch.setattr(BlockTable, "extend", lambda self, num_tokens: extend(self, num_tokens - 1))


@mutation
def table_of_a_resumed_request_is_stale(patch: Patch) -> None:
    """After preemption only blocks beyond those once sent are sent again."""
    release, admit = BlockTable.release, BlockTable.admit
    num_sent: dict[BlockTable, list[int]] = {}

    def stale(self: BlockTable) -> None:
        num_sent[self] = [group.num_sent for group in self._groups]
        release(self)

    def resume(self: BlockTable, match: PrefixMatch, num_tokens: int) -> bool:
        is_admitted = admit(self, match, num_tokens)
        for group, sent in zip(self._groups, num_sent.get(self, ()), strict=False):
            group.num_sent = sent
        return is_admitted

    patch.setattr(BlockTable, "release", stale)
    patch.setattr(BlockTable, "admit", resume)
    patch.setattr(BlockTable, "check", lambda self: None)


@mutation
def preempted_request_keeps_its_blocks(patch: Patch) -> None:
    """Preemption drops the table and not the references."""
    release = BlockTable.release

    def keep(self: BlockTable) -> None:
        if self._request.num_cached_tokens is not None and self._request.computed < self._request.num_needed:
            self._clear()
        else:
            release(self)

    patch.setattr(BlockTable, "release", keep)


# -- prefix index ------------------------------------------------------------------------------------------------------


def _ids_only(self: PrefixIndex, parent: Node | str, key: bytes, ids: tuple[int, ...]) -> Node | None:
    node = self._by_key.get(key)
    return node if node is not None and node.ids == ids else None


@mutation
def hash_ignores_the_prefix(patch: Patch) -> None:
    """False hit: equal ids behind different prefixes are taken for each other."""
    block_key = PrefixIndex.block_key
    patch.setattr(PrefixIndex, "block_key", lambda self, parent_key, ids: block_key(self, b"", ids))
    patch.setattr(PrefixIndex, "find", _ids_only)


@mutation
def hash_ignores_the_salt(patch: Patch) -> None:
    """False hit across tenants: the text is right, and says what another tenant has asked."""
    open_table = KVCache.open

    def unsalted(self: KVCache, request: Request) -> BlockTable:
        request.cache_salt = ""
        return open_table(self, request)

    patch.setattr(KVCache, "open", unsalted)


@mutation
def hash_hit_is_not_compared(patch: Patch) -> None:
    """False hit: a collision of hashes is believed."""
    patch.setattr(PrefixIndex, "find", lambda self, parent, key, ids: self._by_key.get(key))


@mutation
def only_the_own_ids_are_compared_on_a_hash_hit(patch: Patch) -> None:
    """False hit: a collision further up the chain is believed."""
    patch.setattr(PrefixIndex, "find", _ids_only)


@mutation
def blocks_indexed_one_token_early(patch: Patch) -> None:
    """Off by one at a block's edge: a block is indexed before its last position is computed."""
    commit = BlockTable.commit

    def early(self: BlockTable, num_computed: int) -> None:
        commit(self, min(num_computed + 1, len(self._request.ids), self.capacity))

    patch.setattr(BlockTable, "commit", early)


@mutation
def blocks_indexed_before_they_are_applied(patch: Patch) -> None:
    """A launched row's blocks can be hit before anyone knows whether the row came out well."""
    add = PlanDraft.add

    def eager(self: PlanDraft, entry: Entry, num_tokens: int) -> None:
        add(self, entry, num_tokens)
        entry.table._index(min(entry.request.scheduled, len(entry.request.ids)))

    patch.setattr(PlanDraft, "add", eager)


@mutation
def whole_prompt_may_hit(patch: Patch) -> None:
    """A prefix hit covers every known token, and nothing is left to compute logits from."""

    def num_hittable(self: BlockTable) -> int:
        return self.num_full if self._request.takes_prefix_hits else 0

    patch.setattr(BlockTable, "num_hittable", property(num_hittable))


@mutation
def prompt_logprobs_take_a_hit(patch: Patch) -> None:
    """A prefix hit skips positions whose logprobs were asked for."""
    patch.setattr(Request, "takes_prefix_hits", property(lambda self: True))


# -- scheduling --------------------------------------------------------------------------------------------------------


@mutation
def slot_reused_too_early(patch: Patch) -> None:
    """A finished request's slot goes to the next one while a launched row still uses it."""
    finish = Scheduler.finish

    def early(self: Scheduler, request: Request, *, forget_blocks: bool = False) -> None:
        entry = self._entries[request]
        finish(self, request, forget_blocks=forget_blocks)
        if entry.slot != NO_SLOT:
            self._free_slots.append(entry.slot)
            entry.slot = NO_SLOT

    patch.setattr(Scheduler, "finish", early)


@mutation
def preempted_request_loses_the_token_in_flight(patch: Patch) -> None:
    """The result of a row that was launched before its request was preempted is thrown away."""
    apply_row = Scheduler._apply_row

    def lossy(self: Scheduler, entry: Entry, row: object, result: object) -> None:
        if entry.state is State.PREEMPTED:
            entry.request.total = len(entry.request.ids)
            self._drain(entry)
        else:
            apply_row(self, entry, row, result)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "_apply_row", lossy)


@mutation
def preempted_request_resumes_while_in_flight(patch: Patch) -> None:
    """A preempted request waits at once, and may run again before its launched row is applied."""

    def preempt(self: Scheduler, entry: Entry) -> None:
        self.stats.num_preemptions += 1
        self._stop_running(entry)
        self._give_back(entry)
        entry.request.cached = entry.request.computed = entry.request.scheduled = 0
        entry.state = State.WAITING
        self._waiting.push(entry)

    patch.setattr(Scheduler, "_preempt", preempt)


@mutation
def victim_is_the_first_in_rank(patch: Patch) -> None:
    """Preemption in circles: the request that should go on is the one that gives way."""

    def first(self: RunningSet, requester: Entry) -> Entry | None:
        others = [entry for entry in self if entry is not requester]
        return others[0] if others else None

    patch.setattr(RunningSet, "victim", first)


@mutation
def nobody_is_preempted(patch: Patch) -> None:
    """Deadlock: everyone waits for blocks that everyone holds."""
    patch.setattr(RunningSet, "victim", lambda self, requester: None)


@mutation
def waiting_does_not_age(patch: Patch) -> None:
    """Starvation: better priorities that keep coming are always first."""

    def rank_of(request: Request, sequence: int, ageing_s: float, prefill_s: float) -> Rank:
        return (float(request.priority), request.arrival_s, sequence)

    patch.setattr(scheduler_module, "rank_of", rank_of)


@mutation
def followers_are_left_when_their_leader_ends(patch: Patch) -> None:
    """A request waits for ever for a prefix that nobody computes any more."""

    def leave(self: PrefixSharing, entry: Entry) -> list[Entry]:
        for key in list(entry.leading):
            self._end(entry, key)
        return []

    patch.setattr(PrefixSharing, "leave", leave)


@mutation
def aborted_follower_comes_back(patch: Patch) -> None:
    """Lost abort: a request that ended while it was set aside is woken and runs."""

    def unfollow(self: PrefixSharing, entry: Entry) -> None:
        pass

    patch.setattr(PrefixSharing, "unfollow", unfollow)


@mutation
def every_chunk_samples(patch: Patch) -> None:
    """A chunk that does not reach the prompt's end draws a token."""
    launch = Request.launch
    patch.setattr(Request, "launch", lambda self, num_tokens: launch(self, num_tokens) or self.total < self.max_total)


@mutation
def launched_beyond_the_length(patch: Patch) -> None:
    """Overlap launches a row behind the one whose token is the last."""
    patch.setattr(Request, "num_pending", property(lambda self: self.total - self.scheduled))


@mutation
def chunks_forget_what_they_spent(patch: Patch) -> None:
    """A step's time is given to each of its prompts, and whoever decodes waits for all of them."""

    def spend(self: TimedBudget, start: int, num_tokens: int) -> None:
        self.num_tokens -= num_tokens

    patch.setattr(TimedBudget, "spend", spend)


@mutation
def time_of_decodes_is_given_away(patch: Patch) -> None:
    """A budget that leaves out what the step takes without any chunk."""
    for_step = LatencyPolicy.for_step

    def generous(self: LatencyPolicy, decodes: list[Entry], now: float) -> StepBudget:
        budget = for_step(self, decodes, now)
        if isinstance(budget, TimedBudget):
            budget.left_s += self.model.chunked.predict(StepLoad(len(decodes), 0, 0))
        return budget

    patch.setattr(LatencyPolicy, "for_step", generous)


@mutation
def largest_target_counts(patch: Patch) -> None:
    """A step goes by the request that has the most time."""
    patch.setattr(LatencyPolicy, "_allowance", lambda self, decodes, start_s: 1000.0)


@mutation
def prompts_starve_beside_a_tight_target(patch: Patch) -> None:
    """Starvation: where there is never time for a chunk, none is ever computed."""
    patch.setattr(latency_module, "STARVED_STEPS", 10**9)


@mutation
def begun_requests_are_shed(patch: Patch) -> None:
    """Wasted work: a request whose target has passed is refused after its prompt was computed."""

    def shed(self: Scheduler, now: float) -> Iterator[tuple[Request, Refusal]]:
        for entry in list(self._entries.values()):
            target_s = entry.request.ttft_target_s
            if target_s is not None and entry.request.arrival_s + target_s < now:
                self.finish(entry.request)
                yield entry.request, too_late(target_s)

    patch.setattr(Scheduler, "shed", shed)


@mutation
def shed_requests_are_not_told(patch: Patch) -> None:
    """Lost request: refused in the queue, and nobody hears of it."""

    def silent(self: EngineCore, now: float) -> None:
        for request, _ in self._scheduler.shed(now):
            del self._live[request.request_id]

    patch.setattr(EngineCore, "_shed", silent)


# -- the core ----------------------------------------------------------------------------------------------------------


@mutation
def abort_is_forgotten(patch: Patch) -> None:
    """Lost abort: the request stops, and its caller is never told."""

    def silent(self: EngineCore, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            generation = self._live.pop(request_id, None)
            if generation is not None:
                self._scheduler.finish(generation.request)

    patch.setattr(EngineCore, "abort", silent)


@mutation
def abort_is_answered_twice(patch: Patch) -> None:
    """Two terminal events: a repeated abort is reported again."""
    abort = EngineCore.abort

    def twice(self: EngineCore, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            was_live = request_id in self._live
            abort(self, [request_id])
            if not was_live:
                self._outbox.append(Delta(request_id=request_id, finish_reason="abort"))

    patch.setattr(EngineCore, "abort", twice)


@mutation
def row_behind_the_end_is_delivered(patch: Patch) -> None:
    """Overlap: the token of a row that was launched before the end was known reaches the caller."""
    apply = Scheduler.apply

    def all_rows(self: Scheduler, result: StepResult, timing: Timing) -> list[AppliedRow]:
        plan, entries = self._launched[0]
        applied = apply(self, result, timing)
        seen = {row.request for row in applied}
        rows = zip(entries, plan.rows, result.rows, strict=True)
        return applied + [AppliedRow(e.request, row, given) for e, row, given in rows if e.request not in seen]

    patch.setattr(Scheduler, "apply", all_rows)


@mutation
def prompt_logprobs_sent_again_after_preemption(patch: Patch) -> None:
    """A resumed request computes its prompt again and reports it again."""

    def untrimmed(self: Generation, applied: AppliedRow) -> tuple[WireLogprobs, ...]:
        return wire_logprobs(applied.result.prompt_logprobs)

    patch.setattr(Generation, "new_prompt_logprobs", untrimmed)


@mutation
def replayed_tokens_are_taken_for_prompt(patch: Patch) -> None:
    """After a crash the output's length is counted from nought."""
    create = Request.create

    def from_nought(*args: object, **kwargs: object) -> Request:
        request = create(*args, **kwargs)  # type: ignore[arg-type]
        request.max_total += len(request.ids) - request.num_prompt
        request.num_prompt = len(request.ids)
        request.num_needed = max(request.max_total - 1, request.num_prompt)
        return request

    patch.setattr(Request, "create", staticmethod(from_nought))


@mutation
def minimum_length_is_ignored(patch: Patch) -> None:
    """An end-of-sequence token ends a generation before its minimum."""
    patch.setattr(Generation, "ends_with", lambda self, token_id, num_output: token_id in self._ending_ids)


# -- grammars ----------------------------------------------------------------------------------------------------------


@mutation
def masks_are_made_a_step_early(patch: Patch) -> None:
    """Overlap: what may come next is worked out before the tokens of the step before are known."""
    launch = EngineCore._launch

    def hasty(self: EngineCore, plan: StepPlan) -> None:
        launch(self, plan)
        launched = self._launched[-1]
        if launched.awaits_masks:
            launched.handle.sample(self._masks_of(plan))
            launched.awaits_masks = False

    patch.setattr(EngineCore, "_launch", hasty)


@mutation
def mask_goes_to_the_next_row(patch: Patch) -> None:
    """Off by one: a mask is counted among the rows that have one, and applied among all."""
    masks_of = EngineCore._masks_of

    def shifted(self: EngineCore, plan: StepPlan) -> TokenMasks:
        masks = masks_of(self, plan)
        drawing = [index for index, row in enumerate(plan.rows) if row.samples]
        return TokenMasks(tuple(drawing[: len(masks.rows)]), masks.words)

    patch.setattr(EngineCore, "_masks_of", shifted)


@mutation
def mean_takes_prefix_hits(patch: Patch) -> None:
    """A mean of hidden states leaves out those that others computed."""
    patch.setattr(Request, "takes_prefix_hits", property(lambda self: self.params.prompt_logprobs is None))


@mutation
def slot_remembers_its_last_grammar(patch: Patch) -> None:
    """A slot's new request is bound by the grammar of the one before."""
    launch = EngineCore._launch

    def stale(self: EngineCore, plan: StepPlan) -> None:
        known = dict(self._by_slot)
        launch(self, plan)
        self._by_slot = {**self._by_slot, **known}

    patch.setattr(EngineCore, "_launch", stale)


@mutation
def replay_begins_its_grammar_again(patch: Patch) -> None:
    """After a crash the grammar starts at its beginning, in the middle of a text."""
    opened = SimulatedGrammars.open

    def afresh(self: SimulatedGrammars, text: str, token_ids: object, ending_ids: tuple[int, ...]) -> object:
        return opened(self, text, (), ending_ids)

    patch.setattr(SimulatedGrammars, "open", afresh)


@mutation
def aborted_while_it_compiles_and_queued_all_the_same(patch: Patch) -> None:
    """Lost abort: a request that ended while its grammar was compiled comes back when that is done."""

    def forgetful(self: EngineCore, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            generation = self._live.pop(request_id, None)
            if generation is not None:
                if request_id not in self._compiling:
                    self._scheduler.finish(generation.request)
                self._outbox.append(generation.delta(finish_reason="abort"))

    patch.setattr(EngineCore, "abort", forgetful)


@mutation
def complete_grammar_goes_on(patch: Patch) -> None:
    """Nothing may follow, and the next step is asked for more."""
    advance = Generation.advance

    def on(self: Generation, token_ids: tuple[int, ...]) -> tuple[str | None, int | None]:
        reason, stop_token_id = advance(self, token_ids)
        return (None if reason == "stop" and stop_token_id is None else reason), stop_token_id

    patch.setattr(Generation, "advance", on)


# -- replays -----------------------------------------------------------------------------------------------------------


@mutation
def suspects_run_beside_others(patch: Patch) -> None:
    """Whatever ended the engine ends it again, and nobody can tell which of them it was."""
    patch.setattr(Trials, "current", lambda self: None)


@mutation
def suspects_start_while_others_are_launched(patch: Patch) -> None:
    """Off by one step: under overlap the step before a trial is still on the device when it begins."""
    schedule = Scheduler.schedule

    def hasty(self: Scheduler, now: float) -> StepPlan | None:
        launched = list(self._launched)
        if self._trials.is_due and launched:
            self._launched.clear()
            plan = schedule(self, now)
            self._launched.extendleft(reversed(launched))
            return plan
        return schedule(self, now)

    patch.setattr(Scheduler, "schedule", hasty)


@mutation
def replay_tells_its_prompt_again(patch: Patch) -> None:
    """What was delivered before the crash is delivered once more."""
    created = Generation.__init__
    patch.setattr(Generation, "__init__", lambda self, request, num_prompt_logprobs=0: created(self, request))
