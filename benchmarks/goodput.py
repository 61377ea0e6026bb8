"""Requests that come by themselves, a policy that schedules them, and how many were served within both targets.

The real core and scheduler before a machine, which is a device and the clock it runs by: costed and virtual, or the one
that this runs on. Knows no setting, no sweep and no report.
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
from inferd.engine.sched.latency.step_time import Seed
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import StepPlan
from inferd.engine.sched.plan_builder import PlanDraft
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.worker.executor import Executor

BLOCK_SIZE = 32


class Clock(Protocol):
    """Seconds since a run began."""

    def __call__(self) -> float: ...

    def wait_until(self, at_s: float) -> None:
        """Return at `at_s`; at once where that is past."""
        ...


class Machine(Protocol):
    """What runs are computed on."""

    @property
    def seed(self) -> Seed:
        """What the step-time model starts from."""
        ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_at_once(self) -> int:
        """Runs that do not disturb each other, each in a process of its own."""
        ...

    def begin(self, seed: int) -> tuple[Executor, Clock]:
        """A device without work, and a clock at 0. A run of before must be over, and nothing of it launched."""
        ...

    def close(self) -> None:
        """Give back what runs are computed with."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A machine, what is asked of it, and how much at most."""

    name: str
    about: str
    open: Callable[[Setting, Path], Machine]
    """The machine; random checkpoints are kept in the folder."""
    max_num_seqs: int
    max_num_batched_tokens: int
    """Of the scheduler that goes by targets."""
    chunks: Sequence[int]
    """Fixed settings."""
    ttft_s: float
    tpot_s: float
    prompt: tuple[float, float, int]
    """Median, standard deviation of the logarithm, and most tokens."""
    output: tuple[float, float, int]
    rates: Sequence[float]
    """Requests a second."""
    window_s: float
    """How long requests come."""
    seeds: Sequence[int]
    """Each a load of its own; what is reported is the median over them."""
    is_measured: bool = False
    """On the machine where the benchmark runs, and not computed."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_prompt: int
    num_output: int


@dataclass(slots=True)
class Told:
    """What one request was given."""

    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """What a run came to."""

    num_requests: int
    num_met: int
    num_shed: int
    num_late: int
    """Their first token came too late, or not at all."""
    num_slow: int
    """Begun in time, and too slow a token."""
    goodput: float
    """Requests a second."""
    error_p50: float
    error_p95: float

    @property
    def shares(self) -> tuple[float, float, float, float]:
        """Met, refused, late and slow, of all."""
        counts = (self.num_met, self.num_shed, self.num_late, self.num_slow)
        met, shed, late, slow = (count / self.num_requests for count in counts)
        return met, shed, late, slow


class PrefillFirst(Scheduler):
    """While a prompt is to be computed nobody decodes: the lowest TTFT that a server without load has."""

    def schedule(self, now: float) -> StepPlan | None:
        is_behind = any(entry.request.num_pending > 1 for entry in self._running)
        is_startable = bool(len(self._waiting) and self.free_slots)
        if not is_behind and not is_startable:
            return super().schedule(now)
        draft = PlanDraft(self.latency.for_step([], now))
        for entry in list(self._running):
            if entry.request.num_pending > 1:
                self._continue(entry, entry.request.num_pending, draft)
        self._admit_waiting(draft, now)
        if not draft.rows:
            return super().schedule(now)
        plan = draft.finish(self._num_steps)
        self.latency.launched(plan.rows, has_prompts=True)
        self._num_steps += 1
        self._launched.append((plan, draft.entries))
        return plan


def arrivals(setting: Setting, rate: float, seed: int | str) -> list[Arrival]:
    """In order of time."""
    random = Random(f"{seed} {rate}")
    now_s, coming = 0.0, list[Arrival]()
    while (now_s := now_s + random.expovariate(rate)) < setting.window_s:
        coming.append(Arrival(now_s, _length(random, setting.prompt), _length(random, setting.output)))
    return coming


def _length(random: Random, lengths: tuple[float, float, int]) -> int:
    median, sigma, most = lengths
    return max(2, min(most, round(median * random.lognormvariate(0.0, sigma))))


@dataclass(frozen=True, slots=True)
class Policy:
    """How a run is scheduled."""

    kind: type[Scheduler]
    step_tokens: int
    has_ttft: bool = False
    has_tpot: bool = False


TARGETS, REFUSING = "targets", "TTFT alone"
"""By both targets; and by one, which orders and refuses, with the fixed chunks in the middle."""


def policies(setting: Setting) -> Mapping[str, Policy]:
    """By name; all but the first two are fixed settings."""
    middle = setting.chunks[len(setting.chunks) // 2]
    return {
        TARGETS: Policy(Scheduler, setting.max_num_batched_tokens, has_ttft=True, has_tpot=True),
        REFUSING: Policy(Scheduler, middle, has_ttft=True),
        **{f"chunks of {size:,}": Policy(Scheduler, size) for size in setting.chunks},
        "prefill first": Policy(PrefillFirst, max(setting.chunks)),
    }


class _Run:
    """Feeds a core with what comes, and keeps what each request is given."""

    def __init__(self, setting: Setting, policy: Policy, core: EngineCore, coming: Sequence[Arrival]) -> None:
        self._setting, self._policy, self._core, self._coming = setting, policy, core, coming
        self.told: list[Told] = []
        """By arrival, of those that have come."""
        self._open: set[int] = set()
        """Arrivals of which it can still be either whether they are served within both targets."""

    def is_over(self, now_s: float) -> bool:
        """Whether all have come, and nothing can change what any comes to."""
        if len(self.told) < len(self._coming):
            return False
        self._open = {i for i in self._open if self._is_undecided(i, now_s)}
        return not self._open

    def _is_undecided(self, i: int, now_s: float) -> bool:
        arrival, told = self._coming[i], self.told[i]
        first_due_s = arrival.at_s + self._setting.ttft_s
        if told.first_s is None:
            return now_s <= first_due_s
        return told.first_s <= first_due_s and now_s <= told.first_s + self._setting.tpot_s * (arrival.num_output - 1)

    @property
    def next_s(self) -> float:
        """When the next request comes: there is one while nobody has anything to do and the run is not over."""
        return self._coming[len(self.told)].at_s

    def send(self, now_s: float) -> None:
        """All that have come by now."""
        while (i := len(self.told)) < len(self._coming) and (arrival := self._coming[i]).at_s <= now_s:
            self.told.append(Told())
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
        """What a step gave that was over at `now_s`."""
        for delta in output.deltas if output is not None else ():
            i = int(delta.request_id)
            told = self.told[i]
            if delta.token_ids:
                told.first_s = now_s if told.first_s is None else told.first_s
                told.last_s, told.num_tokens = now_s, told.num_tokens + len(delta.token_ids)
            if delta.finish_reason is not None:
                assert delta.failure is None or delta.failure.code == "rate_limit_exceeded", delta.failure
                told.is_refused = delta.failure is not None
                self._open.discard(i)

    def end(self, clock: Clock) -> None:
        """Let go of what is decided and goes on."""
        self._core.abort([str(i) for i in range(len(self._coming))])
        while self._core.has_work:
            self._core.step(clock())
        self._core.check()


def run(setting: Setting, machine: Machine, policy: str, rate: float, seed: int) -> Score:
    """One load through one policy, until it is decided of each request whether it was served within both targets."""
    chosen = policies(setting)[policy]
    limits = SchedulerConfig(
        max_num_seqs=setting.max_num_seqs, max_num_batched_tokens=chosen.step_tokens, max_model_len=1 << 17
    )
    cache = KVCache(machine.num_blocks, BLOCK_SIZE, step_tokens=chosen.step_tokens, shares_prefixes=False)
    coming = arrivals(setting, rate, seed)
    device, clock = machine.begin(seed)
    core = EngineCore(chosen.kind(limits, cache, machine.seed), device, vocab_size=8, clock=clock)
    this = _Run(setting, chosen, core, coming)
    while not this.is_over(clock()):
        if not core.has_work:
            clock.wait_until(this.next_s)
        this.send(clock())
        output = core.step(clock())
        this.take(output, clock())
    score = _score(setting, coming, this.told, core.stats().step_model)
    this.end(clock)
    return score


def _score(setting: Setting, coming: Sequence[Arrival], told: Sequence[Told], model: StepModel) -> Score:
    num_met = num_shed = num_late = num_slow = 0
    for arrival, one in zip(coming, told, strict=True):
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
        len(coming), num_met, num_shed, num_late, num_slow, num_met / setting.window_s, model.error_p50, model.error_p95
    )
