"""A device that computes nothing. A cost function gives the time of a step, on a virtual clock. Schedulers are measured
on it in seconds of a machine that is not there.

Steps run one after another, in launch order, so the core itself makes the overlap. This module knows no scheduler and
no load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from random import Random

from benchmarks.checkpoints import Shape
from benchmarks.gpu.floors import decode_phases, prefill_phases
from benchmarks.gpu.points import Phase, Rates
from inferd.engine.sched.latency.step_time import PriorCosts, StepLoad
from inferd.engine.sched.plan import Row, RowResult, StepPlan, StepResult, TokenMasks

StepCost = Callable[[Sequence[Row]], float]
"""Rows of a step -> seconds."""

H200 = Rates(copy_bytes=0.8 * 4.8e12, flops={"bf16": 0.7 * 989e12})
"""The shares of the vendor's 4.8 TB/s and 989 TFLOP/s that the goals for one H200 assume. Computed, not measured."""


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """The floors of a model on a device: linears, attention of decodes, attention of chunks, each bound by bytes or
    operations. Unlike the step-time model's line, it bends when a bound changes."""

    shape: Shape
    rates: Rates

    def __call__(self, rows: Sequence[Row]) -> float:
        shape, load = self.shape, StepLoad.of(rows)
        body, head = shape.num_body_params, shape.num_head_params
        num_sampled = sum([row.samples for row in rows])
        seconds = Phase(2.0 * (body + head), 2.0 * (body * load.num_tokens + head * num_sampled)).floor_s(self.rates)
        seconds += decode_phases(shape, "bf16", 1, load.context)[1].floor_s(self.rates)
        for row in rows:
            if row.num_tokens > 1:
                before = prefill_phases(shape, "bf16", 1, row.start)[1]
                after = prefill_phases(shape, "bf16", 1, row.start + row.num_tokens)[1]
                seconds += Phase(after.num_bytes, after.num_flops - before.num_flops).floor_s(self.rates)
        return seconds


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A machine's cost as a fitted step-time model describes it."""

    costs: PriorCosts

    def __call__(self, rows: Sequence[Row]) -> float:
        load = StepLoad.of(rows)
        return (self.costs.chunked if load.pairs else self.costs.decode).predict(load)


@dataclass(slots=True)
class VirtualClock:
    """Seconds that only waiting advances."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait_until(self, at_s: float) -> None:
        self.now_s = max(self.now_s, at_s)


@dataclass(slots=True)
class _Handle:
    device: CostedDevice
    result: StepResult
    end_s: float

    def sample(self, masks: TokenMasks) -> None:
        """Does nothing."""

    def wait(self) -> StepResult:
        self.device.clock.wait_until(self.end_s)
        return self.result


class CostedDevice:
    """An executor that draws the same token for every row."""

    def __init__(self, cost: StepCost, clock: VirtualClock, seed: int, noise: float = 0.03) -> None:
        """`noise`: standard deviation of the logarithm of a step's time."""
        self.clock = clock
        self._cost, self._noise, self._random = cost, noise, Random(seed)
        self._free_s = 0.0

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> _Handle:
        assert not awaits_masks, "no load asks for a grammar"
        launched_s = self.clock.now_s
        seconds = self._cost(plan.rows) * exp(self._random.gauss(0.0, self._noise))
        self._free_s = max(self._free_s, launched_s) + seconds
        rows = tuple([RowResult((7,) if row.samples else ()) for row in plan.rows])
        return _Handle(self, StepResult(plan.step_id, rows, self._free_s - launched_s), self._free_s)

    def close(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True, slots=True)
class CostedMachine:
    """A virtual machine to run loads on: each run has a device and a clock of its own."""

    cost: StepCost
    seed: PriorCosts
    """Initial values of the step-time model."""
    num_blocks: int
    num_at_once: int = 2

    def begin(self, seed: int) -> tuple[CostedDevice, VirtualClock]:
        """A device without work and a clock at 0; `seed` draws the noise."""
        clock = VirtualClock()
        return CostedDevice(self.cost, clock, seed), clock

    def close(self) -> None:
        """Nothing to free."""
