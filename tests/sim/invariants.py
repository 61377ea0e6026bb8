"""Invariants after each step and at each launch, whatever is asked. They cover preemption, suspects, blocks in use and
the time of chunks. Reads the scheduler's state; the text is compared elsewhere.
"""

from __future__ import annotations

from math import inf

from inferd.engine.arch.paging import max_blocks
from inferd.engine.cache.prefix import GONE
from inferd.engine.core.kv_events import KVEventLog, hash_of
from inferd.engine.request import Request
from inferd.engine.sched.entry import LONGEST_HOLD_S, State
from inferd.engine.sched.latency.budget import chunk_s
from inferd.engine.sched.latency.policy import STARVED_STEPS
from inferd.engine.sched.latency.step_time import StepLoad
from inferd.engine.sched.plan import StepPlan
from tests.kv_subscriber import Mirror
from tests.sim.engine import SimulatedEngine
from tests.sim.guesses import ScriptedGuesses
from tests.sim.scenario import CHUNK_SPLIT, Limits

Ranks = dict[str, tuple[str, float, float]]
"""(tenant, arrival with its priority in seconds, arrival) of the requests that run."""


class Invariants:
    """The invariants of one engine. Every check raises `AssertionError`."""

    def __init__(self, engine: SimulatedEngine, limits: Limits, depth: int) -> None:
        self._engine, self._limits, self._depth = engine, limits, depth
        self._log, self._mirror = KVEventLog(engine.cache, has_private=True), Mirror()
        self._num_starved = self._num_held = 0
        self._cleared: set[Request] = set()
        """Suspects that got past the position of the crash; a preemption does not make them suspects again."""
        self._num_known: dict[Request, int] = {}
        """Request -> number of its ids when it came."""
        self._num_preemptions = self._num_free = 0
        """Preemptions and free blocks when drafts were added to a step: all else was planned."""
        if isinstance(engine.guesses, ScriptedGuesses):
            engine.guesses.asked = self._guess_asked

    def ranks(self) -> Ranks:
        """Ranks of the running requests. A TTFT target is worth one level at most."""
        ageing_s = self._limits.ageing_s
        ranks: Ranks = {}
        for entry in self._engine.scheduler._running:
            request, scheduling, rank = entry.request, entry.request.scheduling, entry.order_key[0]
            due = scheduling.arrival_s + scheduling.priority * ageing_s
            if scheduling.ttft_target_s is None:
                assert rank == due, f"{request.request_id} ranks at {rank}, not at {due}"
            else:
                assert due - ageing_s <= rank <= due, f"{request.request_id} ranks at {rank}, its arrival at {due}"
            ranks[request.request_id] = (scheduling.tenant, rank, scheduling.arrival_s)
        return ranks

    def _guess_asked(self) -> None:
        """Called when the step is planned but for its drafts."""
        self._num_preemptions = self._engine.scheduler.num_preemptions
        self._num_free = self._engine.cache.pool.num_free

    def check_launch(self, plan: StepPlan) -> None:
        """Checks while earlier steps are still on the device."""
        self._check_suspects()
        self._check_drafts(plan)
        self._check_pace(plan)
        self._check_waits(plan)

    def check_step(self, before: Ranks, live: set[str]) -> None:
        """Checks after a step. `before`: requests that ran then. `live`: requests that have not ended."""
        self._check_suspects()
        self._check_victims(before, live)
        self._check_charges()
        self._engine.core.check()
        self._check_blocks()
        self._check_events()

    def _check_suspects(self) -> None:
        """A suspect that has not been cleared, and has not ended, shares no launched step with other requests."""
        scheduler = self._engine.scheduler
        requests = {entry.request for _, entries in scheduler._launched for entry in entries}
        for request in scheduler._entries.keys() - self._cleared:
            alone_until = min(request.scheduling.alone_until, request.num_needed)
            num_known = self._num_known.setdefault(request, len(request.ids))
            # One step may apply a suspect's last row and preempt it. Then only what it drew shows that it is cleared.
            if request.computed >= alone_until or len(request.ids) > max(alone_until, num_known):
                self._cleared.add(request)
            elif request in requests:
                assert len(requests) == 1, f"{request.request_id} is a suspect, and {len(requests) - 1} run beside it"

    def _check_victims(self, before: Ranks, live: set[str]) -> None:
        """A preempted request ranks behind all requests of its tenant that were not preempted."""
        after = self.ranks()
        victims = [rank for request_id, rank in before.items() if request_id not in after and request_id in live]
        spared = [rank for request_id, rank in before.items() if request_id in after]
        for victim in victims:
            last = max((rank for rank in spared if rank[0] == victim[0]), default=victim)
            assert last <= victim, f"preempted at {victim}, and {last} goes on"

    def _check_blocks(self) -> None:
        """Blocks that launched rows use are held, and no table holds more blocks of a window than the window and its
        steps reach."""
        for block_id in self._engine.device.blocks_in_use():
            assert self._engine.cache.pool.is_held(block_id), f"block {block_id} is free, and a launched row uses it"
        limits = self._limits
        reach = (self._depth + 1) * limits.max_num_batched_tokens
        for entry in self._engine.scheduler._running:
            for window, blocks in zip(limits.windows, entry.table.block_ids, strict=True):
                most = max_blocks(window, limits.max_model_len, reach, limits.block_size)
                num_held = len(blocks) - blocks.count(GONE)
                assert num_held <= most, f"{num_held} blocks held in a window of {window}, at most {most} are seen"

    def _check_events(self) -> None:
        """A subscriber to KV events knows exactly what the prefix index holds."""
        for events in self._log.take():
            self._mirror.read_events(events)
        index = self._engine.cache.index
        indexed = {(change.group, hash_of(change.node.key)): change.node.ids for change in index.contents()}
        assert self._mirror.held == indexed, "a subscriber believes what the prefix index does not hold"

    def _check_drafts(self, plan: StepPlan) -> None:
        """Drafts take what all else leaves: nobody is preempted for them, and no request that was preempted, or runs
        alone, has any."""
        scheduler = self._engine.scheduler
        for row, entry in zip(plan.rows, scheduler._launched[-1][1], strict=True):
            name = entry.request.request_id
            if row.num_drafts:
                assert entry.state is State.RUNNING, f"{name} was preempted, and verifies drafts"
                assert scheduler._suspects._current is not entry, f"{name} is a suspect, and verifies drafts"
        if plan.has_drafts and isinstance(self._engine.guesses, ScriptedGuesses):
            assert scheduler.num_preemptions == self._num_preemptions, "somebody was preempted for drafts"
            if scheduler._slots.claimant is not None:
                num_taken = self._num_free - self._engine.cache.pool.num_free
                assert not num_taken, f"drafts took {num_taken} blocks, and a request waits for memory"

    def _check_charges(self) -> None:
        """A tenant was charged for no token that its request was not given, or does not draw now."""
        for request, entry in self._engine.scheduler._entries.items():
            most = request.total - request.num_drafts
            assert entry.num_charged <= most, f"{request.request_id}: {entry.num_charged} tokens charged, {most} exist"

    def _check_pace(self, plan: StepPlan) -> None:
        """As far as the step-time model knows, chunks delay decodes by at most twice the least target. The exception is
        one split once in a while, so that no prompt starves.

        A step in which a suspect runs alone is left out: all others wait for it.
        """
        if self._engine.scheduler._suspects._current is not None:
            return
        self._check_held(plan)
        admitted = {admission.slot for admission in plan.admissions}
        launched, entries = self._engine.scheduler._launched[-1]
        assert launched is plan
        decodes = [
            entry.request
            for row, entry in zip(plan.rows, entries, strict=True)
            if row.num_tokens == 1 + row.num_drafts and row.samples and row.slot not in admitted
        ]
        targets = [target_s for request in decodes if (target_s := request.scheduling.tpot_target_s) is not None]
        chunks = [row for row in plan.rows if row.num_tokens > 1 and not row.num_drafts]
        costs = self._engine.scheduler.latency.model.chunked
        left_s = 2 * min(targets, default=inf) - costs.predict(StepLoad(len(decodes), 0, 0))
        self._check_time_of_drafts(plan, left_s - sum(chunk_s(costs, row.start, row.num_tokens) for row in chunks))
        if not chunks:
            self._num_starved += 1
            return
        num_starved, self._num_starved = self._num_starved, 0
        chunks_s = [chunk_s(costs, row.start, row.num_tokens) for row in chunks]
        if sum(chunks_s) > max(left_s, 0.0) * (1 + 1e-9) + 1e-12:
            num_tokens = sum(row.num_tokens for row in chunks)
            assert num_starved >= STARVED_STEPS, f"chunks of {sum(chunks_s)} s where {left_s} s are left"
            assert num_tokens <= CHUNK_SPLIT, f"{num_tokens} tokens beyond the targets of those who decode"

    def _check_waits(self, plan: StepPlan) -> None:
        """A decode with a block for its next token is in the step, if that has room. The exceptions are a step in which
        a suspect runs alone, and requests that went on after a crash less than `LONGEST_HOLD_S` ago."""
        scheduler = self._engine.scheduler
        if scheduler._suspects._current is not None or plan.num_tokens >= self._limits.max_num_batched_tokens:
            return
        planned = {row.slot for row in plan.rows}
        for entry in scheduler._running:
            request, since_s = entry.request, scheduler._now - (entry.first_token_s or 0.0)
            if entry.slot not in planned and request.num_pending == 1 and request.scheduled < entry.table.capacity:
                is_held = entry.first_output > 1 and request.scheduling.tpot_target_s is None
                assert is_held and since_s < LONGEST_HOLD_S, f"{request.request_id} waits, {since_s} s after it went on"

    def _check_time_of_drafts(self, plan: StepPlan, left_s: float) -> None:
        """Drafts take no more than the seconds that targets and chunks leave, as far as the model knows."""
        model = self._engine.scheduler.latency.model
        costs = model.chunked if StepLoad.of(plan.rows).pairs else model.decode
        drafts_s = [
            costs.token_s + costs.context_s * (row.start + number)
            for row in plan.rows
            for number in range(1, 1 + row.num_drafts)
        ]
        assert sum(drafts_s) <= max(left_s, 0.0) * (1 + 1e-9) + 1e-12, f"drafts of {sum(drafts_s)} s, {left_s} s left"

    def _check_held(self, plan: StepPlan) -> None:
        """A begun prompt, with blocks for more and room in the step, waits at most `STARVED_STEPS` steps."""
        running = self._engine.scheduler._running
        prompts = {entry.slot for entry in running if entry.request.num_pending > 1}
        num_drafts = sum(row.num_drafts for row in plan.rows)
        is_computed = any(row.num_tokens > 1 + row.num_drafts or row.slot in prompts for row in plan.rows)
        is_held = plan.num_tokens - num_drafts + 2 <= self._limits.max_num_batched_tokens and any(
            entry.request.num_pending > 1 and entry.table.capacity >= entry.request.scheduled + 2 for entry in running
        )
        self._num_held = self._num_held + 1 if is_held and not is_computed else 0
        assert self._num_held <= STARVED_STEPS, f"a prompt was held up for {self._num_held} steps"
