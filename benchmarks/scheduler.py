"""The scheduler's cost for each step, with a device that takes no time: `python -m benchmarks.scheduler`.

2 cores of an AMD EPYC Zen 4, 24 GiB, Python 3.11.7, 2026-11-21. There are 256 decodes behind prompts of 256 or 4,096,
with 10,000 waiting or with windows; all cases are alike. At the median plan takes 0.27 ms and apply 0.25 ms. The core's
whole step with its 256 deltas takes 0.95 to 0.98 ms. Before steps were made of named tuples these were 0.37, 0.29 and
1.15.

All decodes start at once here, so in two of 16 steps all 256 need a block or fill one. "At edges" is the median of
those two, plan and apply. It is 1.3 to 1.5 ms for one cache group; hashing and indexing 256 blocks take half of it. In
the core both fall into one step, which takes 2.9 ms for one group and 5.4 ms for six.

A launched or applied row asserts only those counters that the operation can break. Running all of `Request.check` for
both takes the core's step from 1.03 to 1.06 ms up to 1.09 to 1.15 (measured by turns in one process).

With 2,048 waiting requests that have a TTFT target, of 1, 100 or 10,000 tenants, and 4 ends and 4 starts each step:
shedding and planning take 0.45, 0.70 and 0.65 ms (2026-11-22). They took 0.52, 30 and 8,550 ms when each choice of a
tenant and each search for late requests visited all tenants.

The step-time model, measured together with its predecessor: plan and apply take 0.59 ms instead of 0.54, the core's
step 1.10 instead of 1.06. With a TPOT target for every request and waiting prompts it is 0.68 and 1.19.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import time
from dataclasses import dataclass

from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.request import Request
from inferd.engine.sched.latency.policy import Timing
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import RowResult, StepPlan, StepResult, TokenMasks
from inferd.engine.sched.scheduler import Scheduler

_NUM_BLOCKS = 65_536
_BLOCK_SIZE = 16
_STEP_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True)
class Case:
    """A load that stays the same for all measured steps."""

    name: str
    num_running: int
    num_prompt: int
    num_waiting: int = 0
    windows: tuple[int | None, ...] = (None,)
    tpot_target_s: float | None = None
    ttft_target_s: float | None = None
    num_tenants: int = 1
    """Tenants that send requests in turn."""
    num_ends: int = 0
    """Requests that end before each step; as many others start in it."""


CASES = (
    Case("256 decodes, prompts of 256", 256, 256),
    Case("256 decodes, prompts of 4,096", 256, 4096),
    Case("256 decodes, 10,000 waiting", 256, 256, 10_000),
    Case("256 decodes, all windows", 256, 256, windows=(1024,)),
    Case("256 decodes, targets, 100 waiting", 256, 256, 100, tpot_target_s=0.03),
    Case("256 decodes, full and 5 windows", 256, 256, windows=(None, *[100] * 5)),
    *(
        Case(f"4 of 256 start, {num:,} tenants", 256, 32, 2048, ttft_target_s=3600.0, num_tenants=num, num_ends=4)
        for num in (1, 100, 10_000)
    ),
)


@dataclass(frozen=True, slots=True)
class _Done:
    result: StepResult

    def sample(self, masks: TokenMasks) -> None:
        """Does nothing."""

    def wait(self) -> StepResult:
        return self.result


class InstantDevice:
    """Answers every row with the same token, at once."""

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> _Done:
        rows = tuple(RowResult((7,) if row.samples else ()) for row in plan.rows)
        return _Done(StepResult(plan.step_id, rows, 0.0))

    def close(self) -> None:
        """Nothing to free."""


def measure(case: Case, num_steps: int) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of each step: plan, apply, and the core's whole step with its deltas."""
    scheduler = _loaded_scheduler(case)
    plan_ms, apply_ms = _measure_scheduler(case, scheduler, num_steps)
    return plan_ms, apply_ms, _measure_core(case, num_steps)


def _params() -> SamplingParams:
    return SamplingParams(max_tokens=100_000, seed=0)


def _scheduling(case: Case, number: int) -> SchedulingParams:
    return SchedulingParams(
        arrival_s=float(number),
        tenant=f"tenant {number % case.num_tenants}",
        ttft_target_s=case.ttft_target_s,
        tpot_target_s=case.tpot_target_s,
    )


def _prompt(case: Case, number: int) -> tuple[int, ...]:
    return tuple((number * 31 + i) % 32_000 for i in range(case.num_prompt))


def _new_scheduler(case: Case) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=case.num_running, max_num_batched_tokens=_STEP_TOKENS, max_model_len=1 << 18, ageing_s=10.0
    )
    num_blocks = max(_NUM_BLOCKS, case.num_running * case.num_prompt // 8) * len(case.windows)
    return Scheduler(config, KVCache(num_blocks, _BLOCK_SIZE, case.windows, step_tokens=_STEP_TOKENS))


def _loaded_scheduler(case: Case) -> Scheduler:
    scheduler = _new_scheduler(case)
    for i in range(case.num_running + case.num_waiting):
        prompt = _prompt(case, i)
        scheduler.add(
            Request.create(
                str(i),
                prompt,
                _params(),
                _scheduling(case, i),
                max_model_len=1 << 18,
            )
        )
    return scheduler


def _oldest(scheduler: Scheduler, count: int) -> list[Request]:
    return [entry.request for entry in itertools.islice(scheduler._running, count)]


def _measure_scheduler(case: Case, scheduler: Scheduler, num_steps: int) -> tuple[list[float], list[float]]:
    plan_ms: list[float] = []
    apply_ms: list[float] = []
    device = InstantDevice()
    for step in range(num_steps):
        for request in _oldest(scheduler, case.num_ends if step else 0):
            scheduler.finish(request)
        started = time.perf_counter()
        list(scheduler.shed(float(step)))
        plan = scheduler.schedule(float(step))
        planned = time.perf_counter()
        assert plan is not None
        result = device.launch(plan).wait()
        launched = time.perf_counter()
        scheduler.apply(result, Timing(float(step), 0.02))
        plan_ms.append((planned - started) * 1e3)
        apply_ms.append((time.perf_counter() - launched) * 1e3)
    return plan_ms[2:], apply_ms[2:]


def _measure_core(case: Case, num_steps: int) -> list[float]:
    core = EngineCore(_new_scheduler(case), InstantDevice(), vocab_size=32_000)
    for i in range(case.num_running + case.num_waiting):
        submit = Submit(
            request_id=str(i), prompt_ids=_prompt(case, i), params=_params(), scheduling=_scheduling(case, i)
        )
        core.submit(submit, float(i))
    step_ms: list[float] = []
    for step in range(num_steps):
        core.abort([request.request_id for request in _oldest(core._scheduler, case.num_ends if step else 0)])
        started = time.perf_counter()
        core.step(float(step))
        step_ms.append((time.perf_counter() - started) * 1e3)
    return step_ms[3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    num_steps = parser.parse_args().steps
    print(f"{platform.machine()}, Python {platform.python_version()}, {num_steps} steps; ms a step")
    print(f"{'case':34}{'plan p50':>10}{'apply p50':>11}{'both p50':>10}{'at edges':>10}{'core p50':>10}")
    for case in CASES:
        plan_ms, apply_ms, core_ms = measure(case, num_steps)
        both = sorted(a + b for a, b in zip(plan_ms, apply_ms, strict=True))
        at_edges = both[len(both) * (_BLOCK_SIZE - 2) // _BLOCK_SIZE :]
        plan, apply, whole, edge, core = map(statistics.median, (plan_ms, apply_ms, both, at_edges, core_ms))
        print(f"{case.name:34}{plan:10.3f}{apply:11.3f}{whole:10.3f}{edge:10.3f}{core:10.3f}")


if __name__ == "__main__":
    main()
