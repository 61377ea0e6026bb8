"""Drives the engine's core through a scenario on a virtual clock, and compares all that it says with the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from inferd.engine.api.messages import Delta, FinishReason, StepOutput, Submit, WireLogprobs
from inferd.engine.arch.paging import max_blocks
from inferd.engine.cache.prefix import GONE, blake2b_block
from inferd.engine.cache.table import KVCache
from inferd.engine.core import EngineCore
from inferd.engine.sched.budget import chunk_s
from inferd.engine.sched.latency import STARVED_STEPS
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import StepPlan
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.sched.step_time import StepLoad
from tests.sim.device import SimulatedDevice, SimulationError
from tests.sim.grammar import SimulatedGrammars
from tests.sim.oracle import VOCAB_SIZE, Answer, Job, answer_of
from tests.sim.scenario import CHUNK_SPLIT, Limits, Scenario, flood_job, make_scenario

TICK_S = 0.05
_START_S = 1000.0
_FLOOD_SLACK = 100
"""Ticks that a starved request may take beyond those by which three levels of priority, and one of others' urgency,
have aged away."""


@dataclass(slots=True)
class _Stream:
    """What one request was given so far, and what it should be given."""

    job: Job
    answer: Answer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[WireLogprobs] = field(default_factory=list)
    prompt_logprobs: list[WireLogprobs] = field(default_factory=list)
    was_scheduled: bool = False
    is_aborted: bool = False
    num_duplicates: int = 0
    """Submissions of its id while it lived that have not been refused yet."""
    finish_reason: FinishReason | None = None

    @property
    def is_live(self) -> bool:
        return self.finish_reason is None


def run_seed(seed: int) -> None:
    """Run the scenario of `seed` without overlap and with it. Raises `AssertionError` for anything that is wrong."""
    scenario = make_scenario(seed)
    without, with_overlap = (Simulation(scenario, depth).run() for depth in (0, 1))
    for request_id in without.keys() & with_overlap.keys():
        assert without[request_id] == with_overlap[request_id], f"{request_id} answers otherwise under overlap"


class Simulation:
    """One run of a scenario at one depth."""

    def __init__(self, scenario: Scenario, depth: int) -> None:
        self.scenario = scenario
        self.depth = depth
        self.streams: dict[str, _Stream] = {}
        self.tick = 0
        self._num_stalled = 0
        self._num_flooded = 0
        self._start_engine()

    def run(self) -> dict[str, tuple[int, ...]]:
        """Run to the end; returns the tokens of every request that ended by itself."""
        jobs = sorted(self.scenario.jobs, key=lambda job: job.arrival_tick)
        next_job = 0
        while next_job < len(jobs) or self.core.has_work or self.core.is_compiling:
            while next_job < len(jobs) and jobs[next_job].arrival_tick <= self.tick:
                self._submit(jobs[next_job])
                next_job += 1
            self._disturb()
            self._step()
            self.tick += 1
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
        limits = self.scenario.limits
        config = SchedulerConfig(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            ageing_s=limits.ageing_s,
            watermark=limits.watermark,
            chunk_split=CHUNK_SPLIT,
        )
        self._num_starved = self._num_held = 0
        self.cache = KVCache(
            limits.num_blocks,
            limits.block_size,
            limits.windows,
            step_tokens=limits.max_num_batched_tokens,
            hash_block=_hash_of(limits),
        )
        self.scheduler = Scheduler(config, self.cache)
        self.device = SimulatedDevice(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            windows=limits.windows,
            num_slots=limits.max_num_seqs,
            max_step_tokens=limits.max_num_batched_tokens,
            is_lazy=self.scenario.is_lazy,
            nan_positions={
                job.request_id: job.nan_position for job in self.scenario.jobs if job.nan_position is not None
            },
            watch=self._check_launch,
        )
        self.core = EngineCore(
            self.scheduler,
            self.device,
            vocab_size=VOCAB_SIZE,
            depth=self.depth,
            clock=lambda: self._now,
            grammars=SimulatedGrammars(lambda: self.tick),
        )

    # -- what is asked, and what goes wrong --------------------------------------------------------------------------

    def _submit(self, job: Job) -> None:
        answer = answer_of(job, self.scenario.limits.windows)
        stream = _Stream(job, answer)
        stream.token_ids += answer.token_ids[: job.num_emitted]
        stream.logprobs += answer.logprobs[: job.num_emitted]
        if job.num_emitted:
            stream.prompt_logprobs += answer.prompt_logprobs
        self.streams[job.request_id] = stream
        self._send(stream)

    def _send(self, stream: _Stream, alone_until: int = 0) -> None:
        job = stream.job
        submit = Submit(
            request_id=job.request_id,
            prompt_ids=job.prompt_ids,
            params=job.params,
            priority=job.priority,
            cache_salt=job.cache_salt,
            arrival_s=_START_S + job.arrival_tick * TICK_S,
            emitted_ids=tuple(stream.token_ids),
            num_prompt_logprobs=len(stream.prompt_logprobs),
            alone_until=alone_until,
            ttft_target_s=job.ttft_target_s,
            tpot_target_s=job.tpot_target_s,
        )
        self.core.submit(submit, self._now)

    def _disturb(self) -> None:
        scenario = self.scenario
        live = [stream for stream in self.streams.values() if stream.is_live]
        if scenario.is_flood and any(stream.job.request_id == "starved" for stream in live):
            while self.scheduler.num_waiting < 3:
                self._submit(flood_job(scenario.limits, self._num_flooded, self.tick))
                self._num_flooded += 1
        if self.tick in scenario.crashes:
            dead = self._rows_in_flight()
            self._start_engine()
            for stream in live:
                self._replay(stream, dead.get(stream.job.request_id, 0))
        if self.tick in scenario.duplicates:
            self._take(self.core.flush())
            for stream in [stream for stream in live if stream.is_live][-1:]:
                stream.num_duplicates += 1
                self._send(stream)
        if self.tick in scenario.resets:
            self.core.reset_prefix_cache()
            assert self.cache.pool.num_cached == 0, "cached blocks outlived a reset"
        for tick, request_id in scenario.aborts:
            if tick == self.tick:
                self._abort(request_id)

    def _rows_in_flight(self) -> dict[str, int]:
        """Positions that launched steps reach, of the requests in them."""
        launched = [pair for plan, entries in self.scheduler._launched for pair in zip(plan.rows, entries, strict=True)]
        return {entry.request.request_id: row.start + row.num_tokens for row, entry in launched}

    def _replay(self, stream: _Stream, alone_until: int) -> None:
        """The engine was lost: what the server has is all there is. Who was in the steps lost with it is a suspect."""
        stream.num_duplicates, stream.was_scheduled = 0, False
        self._send(stream, alone_until)

    def _abort(self, request_id: str) -> None:
        stream = self.streams.get(request_id)
        if stream is not None and stream.is_live:
            stream.is_aborted = True
        self.core.abort([request_id])
        if stream is not None and stream.is_aborted:
            self._take(self.core.flush())
            assert not stream.is_live, f"{request_id} was aborted and not told so at once"

    # -- a step, and what must hold after it -------------------------------------------------------------------------

    def _step(self) -> None:
        self._poison_free()
        self._num_stalled += 1
        running = self._running_ranks()
        if self.core.has_work:
            self._take(self.core.step(self._now))
        self._check_trials()
        self._check_victims(running)
        self.core.check()
        self._check_blocks()
        self._poison_free()
        if not self.core.has_work:
            self._num_stalled = 0
        elif self._num_stalled > self._patience():
            raise SimulationError(f"nothing came in {self._num_stalled} steps, {self.core.stats()}")
        if self.scenario.is_flood and self.tick > _FLOOD_SLACK + 4 * self.scenario.limits.ageing_s / TICK_S:
            raise SimulationError("a request starves behind better priorities")

    def _patience(self) -> int:
        """Steps within which some request must get something: each computes its whole sequence, some more than once."""
        return 20 + 3 * sum(
            stream.job.params.max_tokens + len(stream.job.prompt_ids) for stream in self.streams.values()
        )

    def _running_ranks(self) -> dict[str, tuple[float, float]]:
        """(arrival with its priority in seconds, arrival) of the requests that run; a TTFT target is worth a level at
        most."""
        ageing_s = self.scenario.limits.ageing_s
        ranks: dict[str, tuple[float, float]] = {}
        for entry in self.scheduler._running:
            request, rank = entry.request, entry.rank[0]
            due = request.arrival_s + request.priority * ageing_s
            if request.ttft_target_s is None:
                assert rank == due, f"{request.request_id} ranks at {rank}, not at {due}"
            else:
                assert due - ageing_s <= rank <= due, f"{request.request_id} ranks at {rank}, its arrival at {due}"
            ranks[request.request_id] = (rank, request.arrival_s)
        return ranks

    def _check_launch(self, plan: StepPlan) -> None:
        """While what was launched before is still on the device."""
        self._check_trials()
        self._check_pace(plan)

    def _check_trials(self) -> None:
        """Who has not been cleared shares nothing that is launched with anybody."""
        requests = {entry.request for _, entries in self.scheduler._launched for entry in entries}
        for request in requests:
            if request.computed < min(request.alone_until, request.num_needed):
                assert len(requests) == 1, f"{request.request_id} is a suspect, and {len(requests) - 1} run beside it"

    def _check_victims(self, before: dict[str, tuple[float, float]]) -> None:
        """Who was preempted ranks behind all who were not."""
        after = self._running_ranks()
        victims = [rank for request_id, rank in before.items() if request_id not in after and self._is_live(request_id)]
        spared = [rank for request_id, rank in before.items() if request_id in after]
        if victims and spared:
            assert max(spared) <= min(victims), f"preempted at {min(victims)}, and {max(spared)} goes on"

    def _check_blocks(self) -> None:
        """What launched rows read and write is held; no table holds more of a window than it and its steps reach."""
        for block_id in self.device.blocks_in_use():
            assert self.cache.pool.is_held(block_id), f"block {block_id} is free, and a launched row uses it"
        limits = self.scenario.limits
        reach = (self.depth + 1) * limits.max_num_batched_tokens
        for entry in self.scheduler._running:
            for window, blocks in zip(limits.windows, entry.table.block_ids, strict=True):
                most = max_blocks(window, limits.max_model_len, reach, limits.block_size)
                num_held = len(blocks) - blocks.count(GONE)
                assert num_held <= most, f"{num_held} blocks held in a window of {window}, at most {most} are seen"

    def _check_pace(self, plan: StepPlan) -> None:
        """Chunks take no more of the time of those who decode than twice the least target, as far as the model knows:
        but one split, once in a while, that no prompt starves."""
        self._check_held(plan)
        admitted = {admission.slot for admission in plan.admissions}
        running = {entry.slot: entry.request for entry in self.scheduler._running}
        decodes = [row for row in plan.rows if row.num_tokens == 1 and row.samples and row.slot not in admitted]
        targets = [target for row in decodes if (target := running[row.slot].tpot_target_s) is not None]
        load = StepLoad.of(plan.rows)
        if not load.pairs:
            self._num_starved += 1
            return
        num_starved, self._num_starved = self._num_starved, 0
        costs = self.scheduler.latency.model.chunked
        chunks_s = [chunk_s(costs, row.start, row.num_tokens) for row in plan.rows if row.num_tokens > 1]
        left_s = 2 * min(targets, default=inf) - costs.predict(StepLoad(len(decodes), 0, 0))
        if sum(chunks_s) > max(left_s, 0.0) * (1 + 1e-9) + 1e-12:
            num_tokens = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
            assert num_starved >= STARVED_STEPS, f"chunks of {sum(chunks_s)} s where {left_s} s are left"
            assert num_tokens <= CHUNK_SPLIT, f"{num_tokens} tokens beyond the targets of those who decode"

    def _check_held(self, plan: StepPlan) -> None:
        """A prompt that has begun, with blocks for more and room in the step, is held up for so many steps at most."""
        prompts = {entry.slot for entry in self.scheduler._running if entry.request.num_pending > 1}
        is_computed = any(row.num_tokens > 1 or row.slot in prompts for row in plan.rows)
        is_held = plan.num_tokens + 2 <= self.scenario.limits.max_num_batched_tokens and any(
            entry.request.num_pending > 1 and entry.table.capacity >= entry.request.scheduled + 2
            for entry in self.scheduler._running
        )
        self._num_held = self._num_held + 1 if is_held and not is_computed else 0
        assert self._num_held <= STARVED_STEPS, f"a prompt was held up for {self._num_held} steps"

    def _is_live(self, request_id: str) -> bool:
        return self.streams[request_id].is_live

    def _poison_free(self) -> None:
        self.device.poison(self.cache.pool.empty_blocks(), self.scheduler.free_slots)

    def _take(self, output: StepOutput | None) -> None:
        for delta in output.deltas if output is not None else ():
            self._num_stalled = 0
            stream = self.streams[delta.request_id]
            if delta.failure is not None and delta.failure.param == "request_id":
                stream.num_duplicates -= 1
                assert stream.num_duplicates >= 0, f"{delta.request_id} was refused as a duplicate, and is none"
            else:
                self._take_delta(stream, delta)

    def _take_delta(self, stream: _Stream, delta: Delta) -> None:
        request_id, answer = delta.request_id, stream.answer
        assert stream.is_live, f"{request_id} ended and was given {delta}"
        stream.token_ids += delta.token_ids
        stream.logprobs += delta.logprobs
        stream.prompt_logprobs += delta.prompt_logprobs
        given, due = tuple(stream.token_ids), answer.token_ids[: len(stream.token_ids)]
        assert given == due, f"{request_id} was given {given}, and its answer is {answer.token_ids}"
        assert tuple(stream.logprobs) == answer.logprobs[: len(given)], f"{request_id}: logprobs"
        due_logprobs = answer.prompt_logprobs[: len(stream.prompt_logprobs)]
        assert tuple(stream.prompt_logprobs) == due_logprobs, f"{request_id}: prompt logprobs"
        if delta.num_cached_tokens:
            self._check_cached(stream, delta.num_cached_tokens)
        assert not (stream.was_scheduled and delta.scheduled_s is not None), f"{request_id} was first scheduled twice"
        stream.was_scheduled |= delta.scheduled_s is not None
        if delta.finish_reason is not None:
            self._check_ending(stream, delta)
        stream.finish_reason = delta.finish_reason

    def _check_ending(self, stream: _Stream, delta: Delta) -> None:
        request_id, answer = delta.request_id, stream.answer
        if delta.finish_reason == "abort":
            assert stream.is_aborted, f"{request_id} was aborted by nobody"
            return
        code = delta.failure.code if delta.failure is not None else None
        if code == "rate_limit_exceeded":
            assert stream.job.ttft_target_s is not None, f"{request_id} has no target, and was refused for it"
            assert not stream.token_ids and not stream.was_scheduled, f"{request_id} was refused after work on it"
            assert delta.failure is not None
            assert delta.failure.retry_after_s is not None
            return
        end = (delta.finish_reason, delta.stop_token_id, code)
        assert end == (answer.finish_reason, answer.stop_token_id, answer.failure_code), f"{request_id}: {delta}"
        assert tuple(stream.token_ids) == answer.token_ids, f"{request_id} ended before {answer.token_ids}"
        assert delta.embedding == answer.embedding, f"{request_id}: another vector"
        if answer.failure_code is None:
            assert tuple(stream.prompt_logprobs) == answer.prompt_logprobs, f"{request_id}: prompt logprobs missing"

    def _check_cached(self, stream: _Stream, num_cached: int) -> None:
        """A hit is whole blocks, or all of a replay's prompt, that another request of the same salt has begun with."""
        job, size = stream.job, self.scenario.limits.block_size
        assert not job.params.needs_every_position, f"{job.request_id}: a prefix hit skips what is asked for"
        whole = num_cached % size == 0 or num_cached == len(job.prompt_ids)
        assert whole, f"{job.request_id}: {num_cached} cached tokens, block size {size}"
        hit = (*job.prompt_ids, *stream.token_ids)[:num_cached]
        assert len(hit) == num_cached, f"{job.request_id}: {num_cached} cached tokens of {len(hit)}"
        others = (other for other in self.streams.values() if other is not stream)
        assert any(
            other.job.cache_salt == job.cache_salt and (*other.job.prompt_ids, *other.token_ids)[:num_cached] == hit
            for other in others
        ), f"{job.request_id}: {num_cached} cached tokens that nobody computed under salt {job.cache_salt!r}"

    def _check_end(self) -> None:
        for request_id, stream in self.streams.items():
            assert not stream.is_live, f"{request_id} was never told that it ended"
            assert stream.num_duplicates == 0, f"a duplicate of {request_id} was never refused"
        self.core.check()
        self.core.reset_prefix_cache()
        assert self.cache.pool.num_empty == self.cache.pool.num_blocks, "blocks were lost"
        assert len(self.cache.index) == 0, "content is indexed that no block holds"
        assert len(self.scheduler.free_slots) == self.scenario.limits.max_num_seqs, "slots were lost"


def _hash_of(limits: Limits) -> Callable[[bytes, bytes], bytes]:
    """The product's hash, or one that keeps only so many bits of it."""
    bits = limits.hash_bits
    if bits is None:
        return blake2b_block
    return lambda parent_key, payload: bytes([blake2b_block(parent_key, payload)[0] & ((1 << bits) - 1)])
