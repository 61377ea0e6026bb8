"""Compares the engine's steps with the device's peaks: sums since the start, the last minute, and the newest steps.

    MFU = FLOPs / (seconds * peak FLOPs a second)      MBU = bytes / (seconds * peak bytes a second)

Both count only the time of one phase's steps, so an idle engine changes neither. A model that fits the processor's
caches may read faster than memory, which makes its MBU greater than 1. This file knows no Prometheus names. It belongs
to the event loop and is not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, get_args

from inferd.engine.api.cost.roofline import Bound, Peaks, StepPhase
from inferd.engine.api.wire.messages import StepOutput
from inferd.server.observability.instruments import Counter

PHASES: tuple[StepPhase, ...] = get_args(StepPhase)
BOUNDS: tuple[Bound, ...] = get_args(Bound)

WINDOW_S = 60
NUM_NEWEST = 60
"""Number of steps that are kept one by one."""


class MeasuredStep(NamedTuple):
    """One step that ended at `ended_s`, of the clock."""

    ended_s: float
    phase: StepPhase
    num_rows: int
    num_tokens: int
    own_s: float
    """Time of the step after the end of the step before."""
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSummary:
    """The steps of one phase in the last `WINDOW_S` seconds. There is at least one."""

    num_steps: int
    seconds: float
    """Time of the steps, without counting overlaps twice."""
    mfu: float
    mbu: float
    floor_ratio: float
    """Time at the device's peaks over measured time. 1 is perfect."""
    bound_by: Bound
    """The bottleneck of most of the time."""
    median_step_s: float
    """Median of at most the newest 1,000 steps, because sorting all those of a fast engine takes 30 ms."""
    mean_predicted_s: float = 0.0
    """Mean time per step that the step-time model predicted."""


@dataclass(slots=True)
class _Sums:
    """Sums over the steps of one phase that ended in one second."""

    num_steps: int = 0
    flops: int = 0
    num_bytes: int = 0
    own_s: float = 0.0
    floor_s: float = 0.0
    predicted_s: float = 0.0
    seconds: dict[Bound, float] = field(default_factory=lambda: dict.fromkeys(BOUNDS, 0.0))

    def add(self, other: _Sums) -> None:
        self.num_steps += other.num_steps
        self.flops += other.flops
        self.num_bytes += other.num_bytes
        self.own_s += other.own_s
        self.floor_s += other.floor_s
        self.predicted_s += other.predicted_s
        for bound, seconds in other.seconds.items():
            self.seconds[bound] += seconds

    def summary(self, peaks: Peaks, median_step_s: float) -> PhaseSummary:
        return PhaseSummary(
            num_steps=self.num_steps,
            seconds=self.own_s,
            mfu=self.flops / (self.own_s * peaks.flops_per_s),
            mbu=self.num_bytes / (self.own_s * peaks.read_bytes_per_s),
            floor_ratio=self.floor_s / self.own_s,
            bound_by=max(BOUNDS, key=lambda bound: self.seconds[bound]),
            median_step_s=median_step_s,
            mean_predicted_s=self.predicted_s / self.num_steps,
        )


class Efficiency:
    """Sums up every step that ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._peaks: Peaks | None = None
        self._recent: deque[tuple[int, dict[StepPhase, _Sums]]] = deque()
        """(second, sums by phase) of each second in which a step ended."""
        self._durations: dict[StepPhase, deque[tuple[int, float]]] = {phase: deque(maxlen=1_000) for phase in PHASES}
        """(second in which it ended, its time) of the newest steps of each phase."""
        self._newest: deque[MeasuredStep] = deque(maxlen=NUM_NEWEST)
        self.flops, self.bytes, self.seconds, self.floor_seconds = Counter(), Counter(), Counter(), Counter()
        for phase in PHASES:
            for counter in (self.flops, self.bytes, self.floor_seconds):
                counter.add(0, phase)
            for bound in BOUNDS:
                self.seconds.add(0, phase, bound)

    def engine_ready(self, peaks: Peaks) -> None:
        """A new engine begins. The last minute of the old one is dropped."""
        self._peaks = peaks
        self._recent.clear()
        for durations in self._durations.values():
            durations.clear()
        self._newest.clear()

    def step(self, output: StepOutput) -> None:
        """Called once per message of the engine. A message without a step counts nothing."""
        phase, own_s = output.step_phase, output.step_own_s
        if phase is None or own_s <= 0:
            return
        assert self._peaks is not None, "a step before the engine was ready"
        flops, num_bytes = output.step_flops, output.step_bytes
        floor_s = self._peaks.floor_s(flops, num_bytes)
        bound = self._peaks.bound_by(flops, num_bytes, own_s)
        self.flops.add(flops, phase)
        self.bytes.add(num_bytes, phase)
        self.floor_seconds.add(floor_s, phase)
        self.seconds.add(own_s, phase, bound)
        sums = self._now().setdefault(phase, _Sums())
        sums.num_steps += 1
        sums.own_s += own_s
        sums.flops += flops
        sums.num_bytes += num_bytes
        sums.floor_s += floor_s
        sums.predicted_s += output.step_predicted_s
        sums.seconds[bound] += own_s
        self._durations[phase].append((self._recent[-1][0], own_s))
        rows, tokens = output.step_num_rows, output.step_num_tokens
        self._newest.append(MeasuredStep(self._clock(), phase, rows, tokens, own_s, bound))

    def newest(self) -> list[MeasuredStep]:
        """The newest steps of the last minute, at most `NUM_NEWEST`, the newest last."""
        since_s = self._clock() - WINDOW_S
        return [step for step in self._newest if step.ended_s > since_s]

    def last_minute(self) -> Mapping[StepPhase, PhaseSummary]:
        """Summaries by phase. A phase without steps is missing."""
        second = int(self._clock())
        self._forget(second)
        totals: dict[StepPhase, _Sums] = {}
        for _, phases in self._recent:
            for phase, sums in phases.items():
                totals.setdefault(phase, _Sums()).add(sums)
        if self._peaks is None:
            return {}
        return {
            phase: total.summary(
                self._peaks, median(own_s for ended, own_s in self._durations[phase] if ended > second - WINDOW_S)
            )
            for phase, total in totals.items()
        }

    def _now(self) -> dict[StepPhase, _Sums]:
        second = int(self._clock())
        if not self._recent or self._recent[-1][0] != second:
            self._forget(second)
            self._recent.append((second, {}))
        return self._recent[-1][1]

    def _forget(self, second: int) -> None:
        while self._recent and self._recent[0][0] <= second - WINDOW_S:
            self._recent.popleft()
