"""The engine's loop body: take requests, schedule, execute, apply, emit.

Turns messages into requests and results into deltas, and ends generations. Plan N+1 is made while N runs (depth 1) or
after it (depth 0), with the same tokens. A row under a grammar draws only once the tokens before it are known. The
model computes N+1 while N is applied and the masks are made. No sockets, no threads, no tensors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from inferd.engine.api.cost.step_cost import NO_WORK, PlanWork, StepWork
from inferd.engine.api.process.flight_recorder import NO_RECORDER, FlightRecorder
from inferd.engine.api.wire.messages import (
    Delta,
    EngineStats,
    Failure,
    StepCosts,
    StepModel,
    StepOutput,
    Submit,
    SubmitChoices,
)
from inferd.engine.api.wire.params import Adapter
from inferd.engine.cache.below import Tier, offer_to
from inferd.engine.core.live_request import (
    LiveRequest,
    Refuses,
    failure_of,
    fault_in,
    fault_in_seed,
    request_of,
    token_masks,
)
from inferd.engine.core.prefix_loads import PrefixLoads
from inferd.engine.core.rechecks import Rechecks
from inferd.engine.grammar.ports import GrammarError, Grammars, NoGrammars, PendingGrammar
from inferd.engine.request import Request
from inferd.engine.sched.latency.policy import Timing
from inferd.engine.sched.limits import Refusal
from inferd.engine.sched.plan import RowStatus, StepPlan, StepResult, TokenMasks
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.speculation.ports import LiveGuesser
from inferd.engine.worker.executor import Executor, Handle

_MODEL_STEPS = 64
"""Steps between two descriptions of the step-time model; one takes 0.1 ms."""


@dataclass(slots=True)
class _Launched:
    """A step that was launched and not yet applied."""

    plan: StepPlan
    handle: Handle
    work: StepWork
    """Work of the step as planned, without prompt positions that are scored."""
    idle_s: float
    """Seconds between the end of the step before and its launch."""
    awaits_masks: bool
    """Whether its rows wait for token masks before they draw."""


class EngineCore:
    """The core takes requests and gives deltas, one step at a time.

    Every submitted request gets exactly one delta with a finish reason. Deltas of refusals and aborts are kept for the
    next `flush` or `step`, whichever comes first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        vocab_size: int,
        depth: int = 1,
        clock: Callable[[], float] = monotonic,
        work: PlanWork = NO_WORK,
        grammars: Grammars | None = None,
        recorder: FlightRecorder = NO_RECORDER,
        guesses: LiveGuesser | None = None,
        tier: Tier | None = None,
        has_same_bits: bool = True,
        refuses: Refuses | None = None,
    ) -> None:
        """`work`: cost of steps. Without `grammars`, requests with a grammar are refused. `guesses`: those that the
        scheduler verifies. The core opens and closes each request there.

        `tier`: keeps what the cache evicts. `has_same_bits`: whether tokens that are computed again give the same
        bits; only then some are, to compare what was loaded. `refuses`: why the engine cannot answer requests with some
        parameters. `recorder` is called before a step is launched and after
        its results have come.
        """
        if depth not in (0, 1):
            raise ValueError(f"depth must be 0 or 1, but got {depth}")
        self._scheduler = scheduler
        self._executor = executor
        self._vocab_size = vocab_size
        self._refuses = refuses
        self._depth = depth
        self._clock = clock
        self._work = work
        self._grammars = grammars or NoGrammars()
        self._recorder = recorder
        self._guesses = guesses
        self._live: dict[str, LiveRequest] = {}
        self._compiling: dict[str, PendingGrammar] = {}
        """Grammars of live requests that the scheduler does not know yet."""
        self._has_compared = False
        """Whether `stats` has results of comparisons that no message has told."""
        self._loads = self._rechecks = None
        """Live requests whose prefix is loaded from below, which the scheduler does not know yet either. While nothing
        else is to do, what was loaded is computed again."""
        if tier is not None:
            offer_to(tier, scheduler.cache)
            self._loads = PrefixLoads(scheduler.cache, tier, self._seconds_to_compute, clock)
            step_tokens = scheduler.config.max_num_batched_tokens
            self._rechecks = Rechecks(scheduler.cache, tier, self._seconds_to_compute, step_tokens)
            if has_same_bits:
                self._loads.on_loaded = self._rechecks.note_loaded
        self._by_slot: dict[int, LiveRequest] = {}
        """The request last admitted to each slot of the worker."""
        self._adapters: dict[int, str] = {}
        """Digest of the adapter at each index that has one."""
        self._launched: deque[_Launched] = deque()
        self._outbox: list[Delta] = []
        self._num_steps = 0
        self._num_generation_tokens = 0
        self._num_scored = 0
        """Prompt positions whose logits were computed to report their logprobs."""
        self._last_end_s = 0.0
        """Time at which the newest result came."""
        self._schedule_duration_s = 0.0
        """Time that the newest plan took."""
        self._step_model = StepModel()
        """State of the step-time model, updated every `_MODEL_STEPS` steps."""
        self._expert_peaks: tuple[tuple[int, float], ...] = ()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        is_compiled = any(pending.is_done for pending in self._compiling.values())
        is_loaded = self._loads is not None and self._loads.has_news
        return bool(self._outbox or self._launched or self._scheduler.has_work or is_compiled or is_loaded)

    @property
    def is_awaiting(self) -> bool:
        """Whether a request waits for its grammar or its prefix. If so, there may soon be work without a message."""
        return bool(self._compiling) or (self._loads is not None and self._loads.is_busy)

    def submit(self, submit: Submit, now: float) -> None:
        """Accept a request, or refuse it with a terminal delta that says why. `now`: monotonic seconds."""
        self._accept(submit, fault_in(submit, self._vocab_size, self._adapters, self._refuses), now)

    def submit_choices(self, message: SubmitChoices, now: float) -> None:
        """Accept every choice of one prompt, or refuse it as `submit` does. What they share is checked once."""
        fault = fault_in(message.first, self._vocab_size, self._adapters, self._refuses)
        for submit in message.each():
            self._accept(submit, fault or fault_in_seed(submit), now)

    def _accept(self, submit: Submit, fault: Failure | None, now: float) -> None:
        """`fault`: why the request cannot be accepted, if that is already known."""
        if fault is None and submit.request_id in self._live:
            message = f"request id {submit.request_id!r} is in use by a request that has not ended"
            fault = Failure("invalid_value", message, "request_id")
        if fault is not None:
            self._outbox.append(Delta(request_id=submit.request_id, finish_reason="error", failure=fault))
            return
        request = request_of(submit, self._scheduler.config.max_model_len, now)
        live = LiveRequest(request, submit.num_prompt_logprobs)
        ended = live.ended_before()
        if ended is not None:
            self._outbox.append(ended)
            return
        self._live[submit.request_id] = live
        if live.needs_grammar:
            params = submit.params
            ending_ids = params.eos_token_ids + params.stop_token_ids
            pending = self._grammars.open(params.grammar, submit.emitted_ids, ending_ids, submit.scheduling.tenant)
            self._compiling[submit.request_id] = pending
        else:
            self._queue(live, now)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests now. Ids that are not alive are ignored: their last delta is on its way or was read."""
        for request_id in request_ids:
            live = self._live.pop(request_id, None)
            if live is not None:
                is_loading = self._loads is not None and self._loads.abort(live.request)
                if self._compiling.pop(request_id, None) is None and not is_loading:
                    self._finish(live)
                self._outbox.append(live.delta("abort"))

    def drop_adapter(self, adapter: Adapter) -> None:
        """Take no request with what is at this adapter's index: it is being replaced."""
        self._adapters.pop(adapter.index, None)

    def add_adapter(self, adapter: Adapter) -> None:
        """Take requests with this adapter, whose weights the worker has, in place of the one it had at this index."""
        self._adapters[adapter.index] = adapter.digest

    def reset_prefix_cache(self, *, with_running: bool = False, with_tiers: bool = False) -> None:
        """Drop every cached block that no request holds. `with_running`: also let nobody find the blocks that requests
        hold. `with_tiers`: also remove what the tier below has of this model."""
        cache = self._scheduler.cache
        if with_running:
            cache.distrust()
        else:
            cache.reset()
        if with_tiers and self._loads is not None:
            self._loads.distrust()
            self._loads.tier.clear()
        if self._guesses is not None:
            self._guesses.forget_answers()

    def flush(self) -> StepOutput | None:
        """Deltas of refusals and aborts, without waiting for a step, and counts if comparisons have ended. None if
        neither is there."""
        if not self._outbox and not self._has_compared:
            return None
        self._has_compared = False
        return StepOutput(deltas=self._take_outbox(), stats=self.stats())

    def step(self, now: float) -> StepOutput | None:
        """Launch the next plan. Apply the oldest launched one if more than `depth` are launched, or if nothing could be
        planned.

        None if there is nothing to report yet: a first step was only launched. Raises any error of the worker.
        """
        self._end_rechecks()
        self._queue_compiled(now)
        self._queue_loaded(now)
        self._shed(now)
        output = None
        if self._scheduler.awaits_results:
            output = self._complete()
            now = max(now, self._last_end_s)
        started_s = self._clock()
        plan = self._scheduler.schedule(now)
        self._schedule_duration_s = self._clock() - started_s
        if plan is not None:
            self._launch(plan)
            self._draw_next()
        if output is not None:
            return output
        if self._launched and (plan is None or len(self._launched) > self._depth):
            output = self._complete()
            self._draw_next()
            return output
        return self.flush()

    def stats(self) -> EngineStats:
        """Current gauges and counters."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        pool, states, left = cache.pool if cache.has_memory else None, cache.states, cache.left
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(self._compiling) + self._num_loading,
            num_blocks=0 if pool is None else pool.num_blocks,
            num_blocks_used=0 if pool is None else pool.num_held,
            num_blocks_cached=0 if pool is None else pool.num_cached,
            num_blocks_shared=0 if pool is None else pool.num_shared,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.stats.num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            prefix_query_tokens=scheduler.stats.prefix_query_tokens,
            prefix_hit_tokens=scheduler.stats.prefix_hit_tokens,
            num_shed=scheduler.stats.num_shed,
            prefix_stateless_tokens=scheduler.stats.prefix_stateless_tokens,
            num_left_taken=0 if left is None else left.num_taken,
            num_left_damaged=0 if left is None else left.num_damaged,
            **self._tier_stats(),
            num_checkpoints_cached=0 if states is None else states.pool.num_cached,
            num_tokens_waiting=scheduler.num_tokens_waiting,
            step_model=self._step_model,
            expert_peaks=self._expert_peaks,
            num_draft_rows=scheduler.stats.num_draft_rows,
            num_drafts=scheduler.stats.num_drafts,
            accepted_drafts=tuple(scheduler.stats.accepted_drafts) if scheduler.stats.accepted_drafts[0] else (),
        )

    def _tier_stats(self) -> dict[str, Any]:
        if self._loads is None or self._rechecks is None:
            return {}
        counts, rechecked, use = self._loads.counts, self._rechecks.counts, self._loads.tier.use
        return {
            "tier_loaded_tokens": counts.num_loaded_tokens,
            "tier_slow": counts.num_slow,
            "tier_failed": counts.num_failed,
            "tier_damaged": use.num_damaged,
            "tier_distrusted": use.num_distrusted,
            "tier_different": rechecked.num_different,
            "tier_same_tokens": rechecked.num_same_tokens,
            "tier_unwritten": use.num_unwritten,
            "tier_read_bytes": use.num_read_bytes,
            "tier_written_bytes": use.num_written_bytes,
            "tier_wait_s": counts.wait_s,
            "tier_compute_s": counts.compute_s,
            "tier_held_bytes": use.num_held_bytes,
            "host_bytes": use.num_host_bytes,
            "host_read_bytes": use.num_host_read_bytes,
        }

    def check(self) -> None:
        """Prove that all counts and tables agree. Takes time in proportion to the pool, so only for tests and when
        idle."""
        self._scheduler.check()
        num_scheduled = self._scheduler.num_running + self._scheduler.num_waiting
        assert num_scheduled + len(self._compiling) + self._num_loading == len(self._live)
        assert self._compiling.keys() <= self._live.keys()
        if not self._scheduler.has_work and not (self._loads is not None and self._loads.is_busy):
            is_rechecking = self._rechecks is not None and self._rechecks.holds_blocks
            assert is_rechecking or self._scheduler.cache.pool.num_held == 0, "idle, and blocks are held"

    def prepare(self) -> None:
        """Do in advance what later requests need. Called while there is nothing else to do."""
        self._grammars.prepare()

    def recheck(self) -> bool:
        """While there is no work, compute a part of what was loaded from below again. Whether there is more to do
        now."""
        rechecks = self._rechecks
        if rechecks is None or self.has_work:
            return False
        self._distrust_if_different(rechecks)
        scheduler = self._scheduler
        plan = rechecks.next_plan(scheduler.free_slots[0], scheduler.number_step, self._has_adapter_of)
        if plan is None:
            return False
        self._executor.launch(plan).wait()
        rechecks.computed()
        return True

    # -- in ------------------------------------------------------------------------------------------------------------

    def _end_rechecks(self) -> None:
        """Requests have come, which need the blocks."""
        if self._rechecks is not None:
            self._distrust_if_different(self._rechecks)
            self._rechecks.give_way()

    def _distrust_if_different(self, rechecks: Rechecks) -> None:
        """If a piece was found wrong, let no further request hit what may have come from below."""
        is_same = rechecks.settle()
        self._has_compared |= is_same is not None
        if is_same is False:
            self._scheduler.cache.distrust()
            assert self._loads is not None
            self._loads.distrust()
            # Also what was offered since the tier found it: a request may have gone on behind it.
            self._loads.tier.distrust()

    def _has_adapter_of(self, request: Request) -> bool:
        adapter = request.params.adapter
        return adapter is None or self._adapters.get(adapter.index) == adapter.digest

    @property
    def _num_loading(self) -> int:
        return 0 if self._loads is None else len(self._loads)

    def _seconds_to_compute(self, num_tokens: int) -> float:
        """Expected for so many tokens of prompts."""
        return num_tokens / (self._scheduler.prefill_pace().tokens_per_s or math.inf)

    def _queue(self, live: LiveRequest, now: float) -> None:
        """Hand a request to the scheduler, once its prefix is loaded if that lies below."""
        if self._loads is None or not self._loads.open(live.request):
            self._add(live, now)

    def _queue_loaded(self, now: float) -> None:
        """Hand requests whose prefix is loaded to the scheduler."""
        for request in self._loads.ended() if self._loads is not None else ():
            self._add(self._live[request.request_id], now)

    def _add(self, live: LiveRequest, now: float) -> None:
        """Hand a request to the scheduler, and refuse it if it can never run, or not in time."""
        try:
            self._scheduler.add(live.request, now)
        except Refusal as refusal:
            self._refuse(live, failure_of(refusal))
            return
        if self._guesses is not None:
            self._guesses.open(live.request, live.grammar)

    def _shed(self, now: float) -> None:
        """Refuse the waiting requests that can no longer make their TTFT target."""
        for request, refusal in self._scheduler.shed(now):
            self._refuse(self._live[request.request_id], failure_of(refusal))

    def _queue_compiled(self, now: float) -> None:
        """Hand requests with a compiled grammar to the scheduler, in the order in which they came."""
        for request_id, pending in list(self._compiling.items()):
            if not pending.is_done:
                continue
            del self._compiling[request_id]
            live = self._live[request_id]
            try:
                live.grammar = pending.take()
            except GrammarError as error:
                self._refuse(live, Failure("invalid_value", f"the grammar cannot be served: {error}", "grammar"))
                continue
            ended = live.ended_before()
            if ended is None:
                self._queue(live, now)
                continue
            del self._live[request_id]
            self._outbox.append(ended)

    def _refuse(self, live: LiveRequest, failure: Failure) -> None:
        """End a request that the scheduler does not know."""
        del self._live[live.request.request_id]
        if self._guesses is not None:
            self._guesses.close(live.request)
        self._outbox.append(live.delta("error", failure=failure))

    # -- the device ----------------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._by_slot[admission.slot] = self._live[admission.request_id]
        awaits_masks = any(row.samples and self._by_slot[row.slot].grammar is not None for row in plan.rows)
        work = self._work.of(plan.rows)
        rows = [(self._by_slot[row.slot].tag, row.start + row.num_tokens) for row in plan.rows]
        self._recorder.launched(plan.step_id, rows, work)
        idle_s = 0.0 if self._launched else max(0.0, self._clock() - self._last_end_s)
        handle = self._executor.launch(plan, awaits_masks=awaits_masks)
        self._launched.append(_Launched(plan, handle, work, idle_s, awaits_masks))

    def _draw_next(self) -> None:
        """Let the oldest launched step draw its tokens: all that earlier steps drew is known."""
        if self._launched and self._launched[0].awaits_masks:
            launched = self._launched[0]
            launched.handle.sample(self._masks_of(launched.plan))
            launched.awaits_masks = False

    def _masks_of(self, plan: StepPlan) -> TokenMasks:
        """Masks of the draws that are under a grammar and whose requests have not ended."""
        lives = (self._by_slot[row.slot] for row in plan.rows)
        grammars = [live.grammar if self._live.get(live.request.request_id) is live else None for live in lives]
        return token_masks(plan.rows, grammars, self._vocab_size)

    # -- out -----------------------------------------------------------------------------------------------------------

    def _complete(self) -> StepOutput:
        """Wait for the oldest launched step, apply it, and report it."""
        launched = self._launched.popleft()
        plan, result = launched.plan, launched.handle.wait()
        self._recorder.ended(plan.step_id)
        self._expert_peaks = result.expert_peaks or self._expert_peaks
        now, last_end_s = self._clock(), self._last_end_s
        self._last_end_s = now
        self._num_steps += 1
        num_scored = self._num_scored
        own_s, predicted_s = min(result.duration_s, now - last_end_s), self._scheduler.latency.next_predicted_s
        deltas = self._apply(self._until_ends(plan, result), Timing(now, own_s, launched.idle_s))
        if self._num_steps % _MODEL_STEPS == 1:
            self._step_model = self._describe_model()
        num_scored = self._num_scored - num_scored
        work = self._work.of(plan.rows, num_scored) if num_scored else launched.work
        return StepOutput(
            deltas=(*self._take_outbox(), *deltas),
            stats=self.stats(),
            step_ended_s=now,
            step_duration_s=result.duration_s,
            step_num_tokens=plan.num_tokens,
            step_num_rows=len(plan.rows),
            step_phase=work.phase,
            step_own_s=own_s,
            step_flops=work.flops,
            step_bytes=work.num_bytes,
            step_predicted_s=predicted_s,
            schedule_duration_s=self._schedule_duration_s,
        )

    def _describe_model(self) -> StepModel:
        model = self._scheduler.latency.model
        error_p50, error_p95 = model.error(0.5, 0.95)
        decode, chunked = (StepCosts(c.step_s, c.token_s, c.context_s, c.pair_s) for c in (model.decode, model.chunked))
        return StepModel(
            decode=decode,
            chunked=chunked,
            error_p50=error_p50,
            error_p95=error_p95,
            prefill_tokens_per_s=self._scheduler.prefill_pace().tokens_per_s,
        )

    def _until_ends(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result without tokens that rows with drafts drew behind the end of their request."""
        if not plan.has_drafts:
            return result
        rows = [
            self._by_slot[row.slot].until_end(drawn) if row.num_drafts else drawn
            for row, drawn in zip(plan.rows, result.rows, strict=True)
        ]
        return replace(result, rows=tuple(rows))

    def _apply(self, result: StepResult, timing: Timing) -> list[Delta]:
        deltas: list[Delta] = []
        for applied in self._scheduler.apply(result, timing):
            live, status = self._live[applied.request.request_id], applied.result.status
            if status is RowStatus.OK:
                self._num_generation_tokens += len(applied.result.token_ids)
                self._num_scored += len(applied.result.prompt_logprobs)
                delta = live.advance(applied)
            else:
                delta = live.fail(applied)
            if delta is None:
                continue
            if delta.finish_reason is not None:
                del self._live[applied.request.request_id]
                # Nobody may use again what a NaN has reached.
                self._finish(live, forget_blocks=status is RowStatus.NUMERICAL_ERROR)
            deltas.append(delta)
        return deltas

    def _finish(self, live: LiveRequest, *, forget_blocks: bool = False) -> None:
        """Let go of a request that the scheduler knows."""
        self._scheduler.finish(live.request, forget_blocks=forget_blocks)
        if self._guesses is not None:
            self._guesses.close(live.request)

    def _take_outbox(self) -> tuple[Delta, ...]:
        deltas, self._outbox = tuple(self._outbox), []
        return deltas
