"""Drives the engine's core through a scenario on a virtual clock, and compares its output with the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

from inferd.engine.api.wire.messages import Delta, StepOutput, Submit
from tests.sim.cells import SimulationError
from tests.sim.engine import make_engine
from tests.sim.invariants import Invariants
from tests.sim.oracle import Job, answer_of
from tests.sim.scenario import Scenario, flood_job, make_scenario
from tests.sim.stream import Stream

TICK_S = 0.05
_START_S = 1000.0
_FLOOD_SLACK = 100
"""Ticks that a starved request may take after three levels of priority, and one of others' urgency, have aged away."""


@dataclass(slots=True)
class _CoreStream(Stream):
    was_scheduled: bool = False
    num_duplicates: int = 0
    """Submissions of its id while it was live that have not been refused yet."""


def run_seed(seed: int) -> None:
    """Run the scenario of `seed` without overlap, with it, and with drafts if it has some. Raises `AssertionError` for
    any difference."""
    scenario = make_scenario(seed)
    plain = replace(scenario, speculation=None)
    without, with_overlap = (Simulation(plain, depth).run() for depth in (0, 1))
    _compare(without, with_overlap, "under overlap")
    _compare(without, run_with_drafts(seed), "with drafts")


def run_with_drafts(seed: int) -> dict[str, tuple[int, ...]]:
    """Run the scenario of `seed` under overlap, with drafts. Nothing if it has none."""
    scenario = make_scenario(seed)
    return Simulation(scenario, depth=1).run() if scenario.speculation is not None else {}


def _compare(answers: dict[str, tuple[int, ...]], others: dict[str, tuple[int, ...]], how: str) -> None:
    for request_id in answers.keys() & others.keys():
        assert answers[request_id] == others[request_id], f"{request_id} answers otherwise {how}"


class Simulation:
    """One run of a scenario at one depth."""

    def __init__(self, scenario: Scenario, depth: int) -> None:
        self.scenario = scenario
        self.depth = depth
        self.streams: dict[str, _CoreStream] = {}
        self.tick = 0
        self._num_stalled = 0
        self._num_flooded = 0
        self._start_engine()

    def run(self) -> dict[str, tuple[int, ...]]:
        """Run to the end. Returns the tokens of every request that ended by itself."""
        jobs = sorted(self.scenario.jobs, key=lambda job: job.arrival_tick)
        next_job, core = 0, self.engine.core
        while next_job < len(jobs) or core.has_work or core.is_awaiting:
            while next_job < len(jobs) and jobs[next_job].arrival_tick <= self.tick:
                self._submit(jobs[next_job])
                next_job += 1
            self._disturb()
            self._step()
            self.tick += 1
            core = self.engine.core
        self._check_end()
        return {
            request_id: tuple(stream.token_ids)
            for request_id, stream in self.streams.items()
            if stream.finish_reason in ("stop", "length")
        }

    @property
    def _now(self) -> float:
        return _START_S + self.tick * TICK_S

    def _start_engine(self) -> None:
        self.engine = make_engine(
            self.scenario,
            depth=self.depth,
            clock=lambda: self._now,
            tick=lambda: self.tick,
            watch=lambda plan: self._invariants.check_launch(plan),
        )
        self._invariants = Invariants(self.engine, self.scenario.limits, self.depth)

    # -- what is asked, and what goes wrong --------------------------------------------------------------------------

    def _submit(self, job: Job) -> None:
        answer = answer_of(job, self.scenario.limits.views)
        stream = _CoreStream(job, answer)
        stream.token_ids += answer.token_ids[: job.num_emitted]
        stream.logprobs += answer.logprobs[: job.num_emitted]
        if job.num_emitted:
            stream.prompt_logprobs += answer.prompt_logprobs
        self.streams[job.request_id] = stream
        self._send(stream)

    def _send(self, stream: _CoreStream, alone_until: int = 0) -> None:
        job = stream.job
        submit = Submit(
            request_id=job.request_id,
            prompt_ids=job.prompt_ids,
            params=job.params,
            scheduling=job.scheduling(_START_S + job.arrival_tick * TICK_S, alone_until),
            emitted_ids=tuple(stream.token_ids),
            num_prompt_logprobs=len(stream.prompt_logprobs),
        )
        self.engine.core.submit(submit, self._now)

    def _disturb(self) -> None:
        scenario = self.scenario
        live = [stream for stream in self.streams.values() if stream.is_live]
        if scenario.is_flood and any(stream.job.request_id == "starved" for stream in live):
            while self.engine.scheduler.num_waiting < 3:
                self._submit(flood_job(scenario.limits, self._num_flooded, self.tick))
                self._num_flooded += 1
        if self.tick in scenario.crashes:
            dead = self._rows_in_flight()
            self._start_engine()
            for stream in live:
                self._replay(stream, dead.get(stream.job.request_id, 0))
        if self.tick in scenario.duplicates:
            self._take(self.engine.core.flush())
            for stream in [stream for stream in live if stream.is_live][-1:]:
                stream.num_duplicates += 1
                self._send(stream)
        if self.tick in scenario.resets:
            self.engine.core.reset_prefix_cache()
            assert self.engine.cache.pool.num_cached == 0, "cached blocks outlived a reset"
        for tick, request_id in scenario.aborts:
            if tick == self.tick:
                self._abort(request_id)

    def _rows_in_flight(self) -> dict[str, int]:
        """The requests in launched steps, and the positions that those steps reach."""
        launched = self.engine.scheduler._launched
        pairs = [pair for plan, entries in launched for pair in zip(plan.rows, entries, strict=True)]
        return {entry.request.request_id: row.start + row.num_tokens for row, entry in pairs}

    def _replay(self, stream: _CoreStream, alone_until: int) -> None:
        """Send a request again after the engine was lost. A request in a lost step is a suspect."""
        stream.num_duplicates, stream.was_scheduled = 0, False
        self._send(stream, alone_until)

    def _abort(self, request_id: str) -> None:
        stream = self.streams.get(request_id)
        if stream is not None and stream.is_live:
            stream.is_aborted = True
        self.engine.core.abort([request_id])
        if stream is not None and stream.is_aborted:
            self._take(self.engine.core.flush())
            assert not stream.is_live, f"{request_id} was aborted and not told so at once"

    # -- a step, and what must hold after it -------------------------------------------------------------------------

    def _step(self) -> None:
        self.engine.poison_free()
        self._num_stalled += 1
        running = self._invariants.ranks()
        core = self.engine.core
        if core.has_work:
            self._take(core.step(self._now))
        self._invariants.check_step(running, {request_id for request_id in running if self.streams[request_id].is_live})
        self.engine.poison_free()
        if not core.has_work:
            self._num_stalled = 0
        elif self._num_stalled > self._patience():
            raise SimulationError(f"nothing came in {self._num_stalled} steps, {core.stats()}")
        if self.scenario.is_flood and self.tick > _FLOOD_SLACK + 4 * self.scenario.limits.ageing_s / TICK_S:
            raise SimulationError("a request starves behind better priorities")

    def _patience(self) -> int:
        """Steps within which some request must get a token: each computes its whole sequence, some more than once."""
        return 20 + 3 * sum(
            stream.job.params.max_tokens + len(stream.job.prompt_ids) for stream in self.streams.values()
        )

    def _take(self, output: StepOutput | None) -> None:
        for delta in output.deltas if output is not None else ():
            self._num_stalled = 0
            stream = self.streams[delta.request_id]
            if delta.failure is not None and delta.failure.param == "request_id":
                stream.num_duplicates -= 1
                assert stream.num_duplicates >= 0, f"{delta.request_id} was refused as a duplicate, and is none"
            else:
                self._take_delta(stream, delta)

    def _take_delta(self, stream: _CoreStream, delta: Delta) -> None:
        stream.take(delta)
        if delta.num_cached_tokens:
            others = (
                (other.job.cache_salt, (*other.job.prompt_ids, *other.token_ids))
                for other in self.streams.values()
                if other is not stream
            )
            stream.check_cached(delta.num_cached_tokens, self.scenario.limits.block_size, others)
        is_first = delta.scheduled_s is not None
        assert not (stream.was_scheduled and is_first), f"{delta.request_id} was first scheduled twice"
        stream.was_scheduled |= is_first
        if delta.finish_reason is not None:
            is_refused = delta.failure is not None and delta.failure.code == "rate_limit_exceeded"
            assert not (is_refused and stream.was_scheduled), f"{delta.request_id} was refused after work on it"
            stream.check_ending(delta)

    def _check_end(self) -> None:
        for request_id, stream in self.streams.items():
            assert not stream.is_live, f"{request_id} was never told that it ended"
            assert stream.num_duplicates == 0, f"a duplicate of {request_id} was never refused"
        self.engine.check_idle()
