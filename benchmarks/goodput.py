"""Requests that arrive on their own, a scheduling policy, and the number of requests served within both targets.

The real core and scheduler run on a machine: a device and its clock, either virtual with costs or this very machine.
The module knows no setting, no sweep and no report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from inferd.engine.api.wire.messages import StepModel, StepOutput, Submit
from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.sched.latency.step_time import PriorCosts
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import StepPlan
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.sched.step_planner import PlanBuilder
from inferd.engine.worker.executor import Executor

BLOCK_SIZE = 32


class Clock(Protocol):
    """Seconds since a run began."""

    def __call__(self) -> float: ...

    def wait_until(self, at_s: float) -> None:
        """Return at `at_s`, or at once if that is past."""
        ...


class Machine(Protocol):
    """A machine that loads run on."""

    @property
    def seed(self) -> PriorCosts:
        """Initial values of the step-time model."""
        ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_at_once(self) -> int:
        """Number of runs that can share the machine undisturbed, each in a process of its own."""
        ...

    def begin(self, seed: int) -> tuple[Executor, Clock]:
        """A device without work and a clock at 0. The previous run must have ended, with nothing of it launched."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A machine, its load and its limits."""

    name: str
    about: str
    open: Callable[[Setting, Path], Machine]
    """Opens the machine; the folder holds random checkpoints."""
    max_num_seqs: int
    max_num_batched_tokens: int
    """Limit of the scheduler that works by targets."""
    chunks: Sequence[int]
    """Chunk sizes of the fixed settings."""
    ttft_s: float
    tpot_s: float
    prompt: tuple[float, float, int]
    """Median, standard deviation of the logarithm, and maximum of prompt tokens."""
    output: tuple[float, float, int]
    rates: Sequence[float]
    """Requests a second."""
    window_s: float
    """Seconds during which requests arrive."""
    seeds: Sequence[int]
    """Each draws a load of its own; reports show the median over them."""
    is_measured: bool = False
    """Whether it runs on this machine; else times are computed."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_prompt: int
    num_output: int


@dataclass(slots=True)
class RequestTimes:
    """Times of one request's tokens."""

    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a run."""

    num_requests: int
    num_met: int
    num_shed: int
    num_late: int
    """Requests whose first token came too late or never."""
    num_slow: int
    """Requests that began in time and then took too long a token."""
    goodput: float
    """Requests a second within both targets."""
    error_p50: float
    error_p95: float

    @property
    def shares(self) -> tuple[float, float, float, float]:
        """Shares of all requests: met, refused, late and slow."""
        counts = (self.num_met, self.num_shed, self.num_late, self.num_slow)
        met, shed, late, slow = (count / self.num_requests for count in counts)
        return met, shed, late, slow


class PrefillFirst(Scheduler):
    """Decodes only when no prompt is left to compute: the lowest TTFT that a server without load has."""

    def schedule(self, now: float) -> StepPlan | None:
        is_behind = any(entry.request.num_pending > 1 for entry in self._running)
        is_startable = bool(len(self._waiting) and self.free_slots)
        if not is_behind and not is_startable:
            return super().schedule(now)
        builder = PlanBuilder(self.latency.for_step([], now))
        for entry in list(self._running):
            if entry.request.num_pending > 1:
                self._planner._continue(entry, entry.request.num_pending, builder)
        self._planner._admit_waiting(builder, now)
        if not builder.rows:
            return super().schedule(now)
        plan = builder.finish(self._num_steps)
        self.latency.launched(plan.rows, has_prompts=True)
        self._num_steps += 1
        self._launched.append((plan, builder.entries))
        return plan


def arrivals(setting: Setting, rate: float, seed: int | str) -> list[Arrival]:
    """Requests in order of arrival."""
    random = Random(f"{seed} {rate}")
    now_s, load = 0.0, list[Arrival]()
    while (now_s := now_s + random.expovariate(rate)) < setting.window_s:
        load.append(Arrival(now_s, _length(random, setting.prompt), _length(random, setting.output)))
    return load


def _length(random: Random, lengths: tuple[float, float, int]) -> int:
    median, sigma, most = lengths
    return max(2, min(most, round(median * random.lognormvariate(0.0, sigma))))


@dataclass(frozen=True, slots=True)
class Policy:
    """The scheduling of a run."""

    kind: type[Scheduler]
    step_tokens: int
    has_ttft: bool = False
    has_tpot: bool = False


TARGETS, REFUSING = "targets", "TTFT alone"
"""Policy by both targets; policy by the TTFT target alone, which orders and refuses, with the middle fixed chunk."""


def policies(setting: Setting) -> Mapping[str, Policy]:
    """Policies by name; all but the first two are fixed settings."""
    middle = setting.chunks[len(setting.chunks) // 2]
    return {
        TARGETS: Policy(Scheduler, setting.max_num_batched_tokens, has_ttft=True, has_tpot=True),
        REFUSING: Policy(Scheduler, middle, has_ttft=True),
        **{f"chunks of {size:,}": Policy(Scheduler, size) for size in setting.chunks},
        "prefill first": Policy(PrefillFirst, max(setting.chunks)),
    }


class _Run:
    """Submits arriving requests to a core, and keeps the token times of each."""

    def __init__(self, setting: Setting, policy: Policy, core: EngineCore, load: Sequence[Arrival]) -> None:
        self._setting, self._policy, self._core, self._load = setting, policy, core, load
        self.times: list[RequestTimes] = []
        """In order of arrival, for requests that have arrived."""
        self._open: set[int] = set()
        """Arrivals whose verdict is not known yet."""

    def is_over(self, now_s: float) -> bool:
        """Whether all requests have arrived and every verdict is known."""
        if len(self.times) < len(self._load):
            return False
        self._open = {i for i in self._open if self._is_undecided(i, now_s)}
        return not self._open

    def _is_undecided(self, i: int, now_s: float) -> bool:
        arrival, times = self._load[i], self.times[i]
        first_due_s = arrival.at_s + self._setting.ttft_s
        if times.first_s is None:
            return now_s <= first_due_s
        return times.first_s <= first_due_s and now_s <= times.first_s + self._setting.tpot_s * (arrival.num_output - 1)

    @property
    def next_s(self) -> float:
        """Time of the next arrival. There is one whenever the core is idle before the end of the run."""
        return self._load[len(self.times)].at_s

    def send(self, now_s: float) -> None:
        """Submit all requests that have arrived by now."""
        while (i := len(self.times)) < len(self._load) and (arrival := self._load[i]).at_s <= now_s:
            self.times.append(RequestTimes())
            self._open.add(i)
            submit = Submit(
                request_id=str(i),
                prompt_ids=(1,) * arrival.num_prompt,
                params=SamplingParams(max_tokens=arrival.num_output, seed=0),
                scheduling=SchedulingParams(
                    arrival_s=arrival.at_s,
                    ttft_target_s=self._setting.ttft_s if self._policy.has_ttft else None,
                    tpot_target_s=self._setting.tpot_s if self._policy.has_tpot else None,
                ),
            )
            self._core.submit(submit, now_s)

    def take(self, output: StepOutput | None, now_s: float) -> None:
        """Record the results of a step that ended at `now_s`."""
        for delta in output.deltas if output is not None else ():
            i = int(delta.request_id)
            times = self.times[i]
            if delta.token_ids:
                times.first_s = now_s if times.first_s is None else times.first_s
                times.last_s, times.num_tokens = now_s, times.num_tokens + len(delta.token_ids)
            if delta.finish_reason is not None:
                assert delta.failure is None or delta.failure.code == "rate_limit_exceeded", delta.failure
                times.is_refused = delta.failure is not None
                self._open.discard(i)

    def end(self, clock: Clock) -> None:
        """Abort requests that still run though their verdict is known."""
        self._core.abort([str(i) for i in range(len(self._load))])
        while self._core.has_work:
            self._core.step(clock())
        self._core.check()


def run(setting: Setting, machine: Machine, policy: str, rate: float, seed: int) -> Score:
    """Run one load under one policy, until it is known for each request whether both targets were met."""
    chosen = policies(setting)[policy]
    limits = SchedulerConfig(
        max_num_seqs=setting.max_num_seqs, max_num_batched_tokens=chosen.step_tokens, max_model_len=1 << 17
    )
    cache = KVCache(machine.num_blocks, BLOCK_SIZE, step_tokens=chosen.step_tokens, shares_prefixes=False)
    load = arrivals(setting, rate, seed)
    device, clock = machine.begin(seed)
    core = EngineCore(chosen.kind(limits, cache, machine.seed), device, vocab_size=8, clock=clock)
    this = _Run(setting, chosen, core, load)
    while not this.is_over(clock()):
        if not core.has_work:
            clock.wait_until(this.next_s)
        this.send(clock())
        output = core.step(clock())
        this.take(output, clock())
    score = _score(setting, load, this.times, core.stats().step_model)
    this.end(clock)
    return score


def _score(setting: Setting, load: Sequence[Arrival], times: Sequence[RequestTimes], model: StepModel) -> Score:
    num_met = num_shed = num_late = num_slow = 0
    for arrival, one in zip(load, times, strict=True):
        if one.is_refused:
            num_shed += 1
        elif one.first_s is None or one.first_s - arrival.at_s > setting.ttft_s:
            num_late += 1
        elif one.num_tokens < arrival.num_output or one.last_s - one.first_s > setting.tpot_s * (
            arrival.num_output - 1
        ):
            num_slow += 1
        else:
            num_met += 1
    return Score(
        len(load), num_met, num_shed, num_late, num_slow, num_met / setting.window_s, model.error_p50, model.error_p95
    )
