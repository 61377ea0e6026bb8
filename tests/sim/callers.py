"""The callers of a run. Each submits one choice, reads its stream to the end, and compares it with the oracle."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Delta, Submit
from inferd.server.dispatch.admission import FLOOD_FACTOR
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.dispatch.token_stream import TokenStream
from tests.sim.faults import TICK_S, Caller
from tests.sim.history import asked
from tests.sim.oracle import Job, answer_of
from tests.sim.stream import Stream

if TYPE_CHECKING:
    from tests.sim.front import FrontRun


_ABORTED_S = 0.1
"""Longest time for an abort (R11). A step takes a third of that at most, and a frame some milliseconds."""


def _submit_of(job: Job) -> Submit:
    """The submit of a job, arriving now."""
    return Submit(
        request_id=job.request_id,
        prompt_ids=job.prompt_ids,
        params=job.params,
        scheduling=job.scheduling(asyncio.get_running_loop().time()),
    )


class Callers:
    """All callers of one run. Any difference raises `AssertionError`."""

    def __init__(self, run: FrontRun) -> None:
        self._run = run
        self._start_s = asyncio.get_running_loop().time()
        self._streams: dict[str, Stream] = {}
        self._accepted: list[TokenStream] = []
        self._num_received = 0

    async def ask(self, caller: Caller) -> None:
        """Submit at the caller's time, and read to the end unless refused."""
        run, job = self._run, caller.job
        await asyncio.sleep(job.arrival_tick * TICK_S)
        choices = [caller, *(other for other in run.scenario.callers if other.choice_of == job.request_id)]
        submits = [_submit_of(choice.job) for choice in choices]
        is_refused = run.history.is_refused(asked(job.prompt_ids, job.params))
        num_waiting = len(self._waiting())
        try:
            streams = run.router.submit_choices(submits)
        except RequestError as error:
            self._check_refusal(job, error, len(choices), is_refused=is_refused)
            return
        assert not is_refused, f"{job.request_id} asks for what ended engines, and is taken"
        most = run.scenario.max_waiting
        assert not num_waiting or num_waiting + len(streams) <= most, f"{num_waiting} waited, and {len(streams)} came"
        self._accepted += streams
        self._check_id_in_use(submits[-1])
        await asyncio.gather(*map(self._follow, choices, streams))

    async def _follow(self, caller: Caller, tokens: TokenStream) -> None:
        """Read one choice to its end."""
        leaving = asyncio.create_task(self._leave(caller, tokens)) if caller.abort_s is not None else None
        await self._read(caller, tokens)
        if leaving is not None:
            leaving.cancel()

    async def _read(self, caller: Caller, tokens: TokenStream) -> None:
        run, job = self._run, caller.job
        answer = answer_of(job, run.scenario.core.limits.views)
        stream = self._streams[job.request_id] = Stream(job, answer)
        num_cached = None
        async for delta in tokens:
            is_first = not stream.token_ids and delta.token_ids
            stream.take(delta)
            if is_first:
                num_cached = delta.num_cached_tokens
                self._check_cached(stream, num_cached)
            elif delta.token_ids:
                assert delta.num_cached_tokens == num_cached, f"{job.request_id}: another number of cached tokens"
            if delta.finish_reason is not None:
                self._check_ending(stream, tokens, delta)
            elif caller.stops_after is not None and len(stream.token_ids) >= caller.stops_after:
                self._abort(tokens, "stop")
            if caller.pause_s:
                await asyncio.sleep(run.rng.random() * caller.pause_s)
        assert not stream.is_live, f"{job.request_id} ended without saying how"
        assert tokens.num_generated == len(stream.token_ids), f"{job.request_id}: usage is not what was received"
        self._num_received += len(stream.token_ids)
        tokens.abort()
        async for delta in tokens:
            raise AssertionError(f"{job.request_id} ended and was given {delta}")

    async def _leave(self, caller: Caller, tokens: TokenStream) -> None:
        assert caller.abort_s is not None
        await asyncio.sleep(caller.abort_s)
        self._abort(tokens, "abort")
        tokens.abort()

    def _abort(self, tokens: TokenStream, reason: str) -> None:
        run, loop, process = self._run, asyncio.get_running_loop(), self._run.process_of(tokens.request_id)
        run.history.aborted(tokens.request_id, process)
        tokens.abort(reason)  # type: ignore[arg-type]

        def check() -> None:
            if tokens._closed or process is not run.process_of(tokens.request_id) or not run.is_calm(loop.time()):
                return
            if run.num_replaying:
                loop.call_later(_ABORTED_S, check)
            else:
                run.failed(AssertionError(f"{tokens.request_id} was aborted {_ABORTED_S} s ago, and goes on"))

        if process is not None and run.is_calm(loop.time()):
            loop.call_later(_ABORTED_S, check)

    def _check_refusal(self, job: Job, error: RequestError, num_choices: int, *, is_refused: bool) -> None:
        run, router = self._run, self._run.router
        if is_refused and router.lifecycle.is_ready:
            assert error.code == "engine_error", error
            return
        if error.code == "model_not_loaded":
            assert router.lifecycle.failure, f"{job.request_id} is refused by a model that may be loaded"
            return
        if error.code == "model_is_asleep":
            assert router.lifecycle.is_asleep, f"{job.request_id} is refused by a model that is awake"
            return
        waiting = self._waiting()
        num_own = sum(tokens.submit.scheduling.tenant == job.tenant for tokens in waiting)
        num_free = run.scenario.max_waiting - len(waiting)
        if error.code == "rate_limit_exceeded":
            assert job.ttft_target_s is not None and waiting, f"refused for a target, with none or no queue: {error}"
            return
        if error.code == "slow_down":
            is_flood = (num_own or num_choices > 1) and num_own + num_choices > FLOOD_FACTOR * (num_free - num_choices)
            assert job.tenant and is_flood, f"{num_own} wait, and {num_free} may: {error}"
            return
        if error.code == "request_exceeds_work_limit":
            most = FLOOD_FACTOR * run.scenario.max_waiting // (FLOOD_FACTOR + 1)
            assert job.tenant and num_choices > most, f"{num_choices} choices of {most}: {error}"
            return
        assert error.code == "server_is_overloaded", error
        is_away = not router.replicas.is_up and router.lifecycle.state not in (
            State.UNLOADED,
            State.LOADING,
        )
        assert num_free < num_choices or is_away, f"refused with room and an engine: {error}"

    def _waiting(self) -> list[TokenStream]:
        return [tokens for tokens in self._accepted if not tokens.has_begun and not tokens._closed]

    def _check_id_in_use(self, submit: Submit) -> None:
        try:
            self._run.router.submit(submit)
        except RequestError:
            return
        raise AssertionError(f"{submit.request_id} was taken twice")

    def _check_cached(self, stream: Stream, num_cached: int) -> None:
        if num_cached:
            # A request that was sent twice may hit what an earlier engine computed of it.
            is_again = self._run.history.num_sent[stream.job.request_id] > 1
            others = (
                (other.job.cache_salt, (*other.job.prompt_ids, *other.answer.token_ids))
                for other in self._streams.values()
                if other is not stream or is_again
            )
            stream.check_cached(num_cached, self._run.scenario.core.limits.block_size, others)

    def _check_ending(self, stream: Stream, tokens: TokenStream, delta: Delta) -> None:
        """Check that it ended as its answer does, or for a reason that may end a choice early."""
        history, job = self._run.history, stream.job
        code = delta.failure.code if delta.failure is not None else None
        if code == "engine_error":
            if not history.has_given_up:
                history.given_up(job.request_id, asked(job.prompt_ids, job.params))
            return
        if code == "model_not_loaded":
            assert self._run.num_failures, f"{job.request_id} ends with a model that never failed"
            return
        if code == "rate_limit_exceeded":
            assert history.num_sent[job.request_id] == 1, f"{job.request_id} was taken, and refused after an outage"
        stream.is_aborted = tokens.abort_reason is not None
        stream.check_ending(delta)

    def check_end(self) -> None:
        """Checks after all requests have ended."""
        run = self._run
        assert run.router.streams.num_active == 0, "streams are left"
        assert run.router.streams.backlog.num_requests == 0, f"{run.router.streams.backlog.num_requests} wait of none"
        assert run.metrics.num_counted == self._num_received, "tokens were counted that nobody received"
        for caller in run.scenario.callers:
            run.history.check_poison(caller.job.request_id)
