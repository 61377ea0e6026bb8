"""The engine's loop body: take requests, schedule, execute, apply, emit.

Turns what the wire says into requests, and results into deltas; decides when a generation ends. Plan N+1 is made while
N runs (depth 1) or after it (depth 0): the tokens are the same. No sockets, no threads, no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

from inferd.engine.api.messages import Delta, EngineStats, Failure, FinishReason, StepOutput, Submit, WireLogprobs
from inferd.engine.api.params import ParamError, check_token_ids
from inferd.engine.api.work import NO_WORK, WorkModel
from inferd.engine.request import Request
from inferd.engine.sched.limits import Refusal
from inferd.engine.sched.plan import RowStatus, StepPlan, StepResult, TokenLogprobs
from inferd.engine.sched.scheduler import AppliedRow, Scheduler
from inferd.engine.worker.executor import Executor, Handle


class _Generation:
    """What the core knows of a live request beyond its counters."""

    __slots__ = ("ending_ids", "is_first_delta", "num_prompt_logprobs", "request")

    def __init__(self, request: Request) -> None:
        params = request.params
        self.request = request
        self.ending_ids = frozenset(params.eos_token_ids + params.stop_token_ids)
        # A replay's prompt logprobs were sent before its first token was.
        self.num_prompt_logprobs = request.num_prompt - 1 if request.num_output else 0
        """Prompt positions whose logprobs were sent, counted after the first, which has none."""
        self.is_first_delta = True

    def ends_with(self, token_id: int, num_output: int) -> bool:
        """Whether `token_id`, the output's token number `num_output`, ends the generation."""
        return token_id in self.ending_ids and num_output > self.request.params.min_tokens


class EngineCore:
    """Requests in, deltas out, one step at a time.

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
        work: WorkModel = NO_WORK,
    ) -> None:
        """`work` says what the model's steps cost."""
        if depth not in (0, 1):
            raise ValueError(f"depth must be 0 or 1, but got {depth}")
        self._scheduler = scheduler
        self._executor = executor
        self._vocab_size = vocab_size
        self._depth = depth
        self._clock = clock
        self._work = work
        self._live: dict[str, _Generation] = {}
        self._launched: deque[tuple[StepPlan, Handle]] = deque()
        self._outbox: list[Delta] = []
        self._num_steps = 0
        self._num_generation_tokens = 0
        self._num_scored = 0
        """Prompt positions whose logits were computed to be reported."""
        self._last_end_s = 0.0
        """When the newest result had come."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._outbox or self._launched or self._scheduler.has_work)

    def submit(self, submit: Submit, now: float) -> None:
        """Accept a request, or refuse it with a terminal delta that says why. `now`: monotonic seconds."""
        failure = self._refusal_of(submit)
        if failure is None:
            request = _request_of(submit, self._scheduler.config.max_model_len, now)
            generation = _Generation(request)
            ended = _ended_before(generation)
            if ended is not None:
                self._outbox.append(Delta(request_id=submit.request_id, finish_reason=ended[0], stop_token_id=ended[1]))
                return
            try:
                self._scheduler.add(request)
            except Refusal as refusal:
                failure = Failure(refusal.code, refusal.message, refusal.param)
            else:
                self._live[submit.request_id] = generation
                return
        self._outbox.append(Delta(request_id=submit.request_id, finish_reason="error", failure=failure))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests now. Ids that are not alive are ignored: their last delta is on its way or was read."""
        for request_id in request_ids:
            generation = self._live.pop(request_id, None)
            if generation is not None:
                self._scheduler.finish(generation.request)
                self._outbox.append(self._delta(generation, finish_reason="abort"))

    def reset_prefix_cache(self) -> None:
        """Drop every cached block that no request holds."""
        self._scheduler.cache.reset()

    def flush(self) -> StepOutput | None:
        """The deltas of refusals and aborts, without waiting for a step; None where there are none."""
        if not self._outbox:
            return None
        return StepOutput(deltas=self._take_outbox(), stats=self.stats())

    def step(self, now: float) -> StepOutput | None:
        """Launch the next plan; apply the oldest launched one where more than `depth` are, or nothing could be planned.

        None where there is nothing to report yet: a first step that was only launched. Raises what the worker raised.
        """
        started_s = self._clock()
        plan = self._scheduler.schedule(now)
        schedule_duration_s = self._clock() - started_s
        if plan is not None:
            self._launched.append((plan, self._executor.launch(plan)))
        if self._launched and (plan is None or len(self._launched) > self._depth):
            return self._complete(schedule_duration_s)
        return self.flush()

    def stats(self) -> EngineStats:
        """Gauges and counters now."""
        scheduler, pool = self._scheduler, self._scheduler.cache.pool
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            num_blocks_used=pool.num_held,
            num_blocks_cached=pool.num_cached,
            num_steps=self._num_steps,
            num_preemptions=scheduler.stats.num_preemptions,
            num_prompt_tokens=scheduler.stats.num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            prefix_query_tokens=scheduler.stats.prefix_query_tokens,
            prefix_hit_tokens=scheduler.stats.prefix_hit_tokens,
        )

    def check(self) -> None:
        """Prove that all books agree; costs time in proportion to the pool, so for tests and when idle."""
        self._scheduler.check()
        assert self._scheduler.num_running + self._scheduler.num_waiting == len(self._live)
        if not self._scheduler.has_work:
            assert self._scheduler.cache.pool.num_held == 0, "idle, and blocks are held"

    # -- in ------------------------------------------------------------------------------------------------------------

    def _refusal_of(self, submit: Submit) -> Failure | None:
        if submit.request_id in self._live:
            message = f"request id {submit.request_id!r} is in use by a request that has not ended"
            return Failure("invalid_value", message, "request_id")
        try:
            submit.params.check(self._vocab_size)
            _check_ids(submit, self._vocab_size)
        except ParamError as error:
            return Failure("invalid_value", str(error), error.param)
        return None

    # -- out -----------------------------------------------------------------------------------------------------------

    def _complete(self, schedule_duration_s: float) -> StepOutput:
        """Wait for the oldest launched step, apply it, and report it."""
        plan, handle = self._launched.popleft()
        result = handle.wait()
        now, last_end_s = self._clock(), self._last_end_s
        self._last_end_s = now
        self._num_steps += 1
        num_scored = self._num_scored
        deltas = self._apply(result)
        _, starts, counts, samples = zip(*plan.rows, strict=True)
        work = self._work.step(starts, counts, sum(samples) + self._num_scored - num_scored)
        return StepOutput(
            deltas=(*self._take_outbox(), *deltas),
            stats=self.stats(),
            step_duration_s=result.duration_s,
            step_num_tokens=sum(counts),
            step_num_rows=len(plan.rows),
            step_phase=work.phase,
            step_own_s=min(result.duration_s, now - last_end_s),
            step_flops=work.flops,
            step_bytes=work.num_bytes,
            schedule_duration_s=schedule_duration_s,
        )

    def _apply(self, result: StepResult) -> list[Delta]:
        deltas: list[Delta] = []
        for applied in self._scheduler.apply(result):
            generation = self._live[applied.request.request_id]
            if applied.result.status is RowStatus.OK:
                delta = self._advance(generation, applied)
            else:
                delta = self._fail(generation, applied.result.status)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _advance(self, generation: _Generation, applied: AppliedRow) -> Delta | None:
        """What an applied row gives its caller; ends the request where its token or its length does."""
        request, result = generation.request, applied.result
        self._num_generation_tokens += len(result.token_ids)
        self._num_scored += len(result.prompt_logprobs)
        prompt_logprobs = _new_prompt_logprobs(generation, applied)
        finish_reason: FinishReason | None = None
        stop_token_id: int | None = None
        if result.token_ids and generation.ends_with(result.token_ids[-1], request.num_output):
            finish_reason, stop_token_id = "stop", result.token_ids[-1]
        elif request.is_complete:
            finish_reason = "length"
        if finish_reason is not None:
            del self._live[request.request_id]
            self._scheduler.finish(request)
        elif not result.token_ids and not prompt_logprobs:
            return None
        return self._delta(
            generation,
            token_ids=result.token_ids,
            logprobs=_wire(result.logprobs),
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
        )

    def _fail(self, generation: _Generation, status: RowStatus) -> Delta:
        """End a request that drew nothing. Only where the model is at fault are its blocks not to be trusted."""
        request = generation.request
        del self._live[request.request_id]
        self._scheduler.finish(request, forget_blocks=status is RowStatus.NUMERICAL_ERROR)
        if status is RowStatus.NUMERICAL_ERROR:
            message = f"nothing could be drawn after {len(request.ids)} tokens: the logits held no finite number"
            failure = Failure("numerical_error", message)
        else:
            names = "allowed_token_ids, bad_words, logit_bias and min_tokens"
            failure = Failure("invalid_value", f"{names} leave no token to draw after {request.num_output} tokens")
        return self._delta(generation, finish_reason="error", failure=failure)

    def _delta(
        self,
        generation: _Generation,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[WireLogprobs, ...] = (),
        prompt_logprobs: tuple[WireLogprobs, ...] = (),
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        failure: Failure | None = None,
    ) -> Delta:
        request = generation.request
        scheduled_s = request.scheduled_s if generation.is_first_delta else None
        generation.is_first_delta = False
        return Delta(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=request.num_cached_tokens or 0,
            scheduled_s=scheduled_s,
            failure=failure,
        )

    def _take_outbox(self) -> tuple[Delta, ...]:
        deltas = tuple(self._outbox)
        self._outbox.clear()
        return deltas


def _check_ids(submit: Submit, vocab_size: int) -> None:
    """Raise `ParamError` for ids that cannot be a sequence of this model, or an output longer than was asked for."""
    if not submit.prompt_ids:
        raise ParamError("prompt", submit.prompt_ids, "must hold at least one token")
    check_token_ids("prompt", submit.prompt_ids, vocab_size)
    check_token_ids("emitted_ids", submit.emitted_ids, vocab_size)
    if len(submit.emitted_ids) > submit.params.max_tokens:
        rule = f"must hold at most max_tokens ({submit.params.max_tokens}) ids"
        raise ParamError("emitted_ids", len(submit.emitted_ids), rule)


def _request_of(submit: Submit, max_model_len: int, now: float) -> Request:
    return Request.create(
        submit.request_id,
        submit.prompt_ids,
        submit.params,
        max_model_len=max_model_len,
        arrival_s=min(submit.arrival_s, now) if submit.arrival_s > 0 else now,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        emitted_ids=submit.emitted_ids,
    )


def _ended_before(generation: _Generation) -> tuple[FinishReason, int | None] | None:
    """How a replayed request had ended already, when all that was missing is the word that it had."""
    request = generation.request
    if request.num_output and generation.ends_with(request.ids[-1], request.num_output):
        return "stop", request.ids[-1]
    if request.num_output and request.num_output == request.params.max_tokens:
        return "length", None
    return None


def _new_prompt_logprobs(generation: _Generation, applied: AppliedRow) -> tuple[WireLogprobs, ...]:
    """Those not sent before: a request that was preempted computes its prompt again."""
    logprobs = applied.result.prompt_logprobs
    if not logprobs:
        return ()
    new = logprobs[max(0, generation.num_prompt_logprobs - applied.row.start) :]
    generation.num_prompt_logprobs += len(new)
    return _wire(new)


def _wire(logprobs: tuple[TokenLogprobs, ...]) -> tuple[WireLogprobs, ...]:
    if not logprobs:
        return ()
    return tuple(WireLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top) for entry in logprobs)
