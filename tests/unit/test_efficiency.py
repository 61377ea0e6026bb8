"""Compares the window of the last minute of steps with a plain list of them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.engine.api.cost.roofline import Peaks, StepPhase
from inferd.engine.api.wire.messages import EngineStats, StepOutput
from inferd.server.observability.efficiency import NUM_NEWEST, PHASES, Efficiency

PEAKS = Peaks(1e10, 1e12)


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def worked(phase: StepPhase, own_s: float, flops: int = 10**9, num_bytes: int = 10**7) -> StepOutput:
    return StepOutput(
        deltas=(), stats=EngineStats(), step_phase=phase, step_own_s=own_s, step_flops=flops, step_bytes=num_bytes
    )


STEPS = st.lists(
    st.tuples(
        st.floats(0, 40), st.sampled_from(PHASES), st.floats(1e-4, 1), st.integers(0, 10**12), st.integers(0, 10**10)
    ),
    max_size=30,
)


@given(STEPS)
def test_the_last_minute_is_that_of_a_list(steps: list[tuple[float, StepPhase, float, int, int]]) -> None:
    """The minute has whole seconds, and a second is dropped at once."""
    clock = Clock()
    efficiency = Efficiency(clock)
    efficiency.engine_ready(PEAKS)
    seen: list[tuple[float, StepOutput]] = []
    for gap_s, *work in steps:
        clock.now_s += gap_s
        output = worked(*work)
        efficiency.step(output)
        seen.append((clock.now_s, output))
    recent = [output for ended_s, output in seen if int(ended_s) > int(clock.now_s) - 60]
    summaries = efficiency.last_minute()
    assert summaries.keys() == {output.step_phase for output in recent}
    for phase, summary in summaries.items():
        mine = [output for output in recent if output.step_phase == phase]
        seconds = sum(output.step_own_s for output in mine)
        floors = [PEAKS.floor_s(output.step_flops, output.step_bytes) for output in mine]
        assert summary.num_steps == len(mine)
        assert summary.seconds == pytest.approx(seconds)
        assert summary.mfu == pytest.approx(sum(output.step_flops for output in mine) / seconds / 1e12)
        assert summary.mbu == pytest.approx(sum(output.step_bytes for output in mine) / seconds / 1e10)
        assert summary.floor_ratio == pytest.approx(sum(floors) / seconds)
        assert summary.median_step_s == median(output.step_own_s for output in mine)
    newest = [(output.step_phase, output.step_own_s) for ended_s, output in seen if ended_s > clock.now_s - 60]
    assert [(step.phase, step.own_s) for step in efficiency.newest()] == newest


def test_the_median_is_that_of_the_newest_thousand() -> None:
    """The older steps of a fast engine's minute are counted, but not sorted."""
    clock = Clock()
    efficiency = Efficiency(clock)
    efficiency.engine_ready(PEAKS)
    for own_s in [1.0] * 2_000 + [0.25] * 1_000:
        clock.now_s += 0.01
        efficiency.step(worked("decode", own_s))
    summary = efficiency.last_minute()["decode"]
    assert (summary.num_steps, summary.seconds, summary.median_step_s) == (3_000, 2_250.0, 0.25)


def test_a_phase_is_bound_by_what_took_most_of_its_time_and_not_by_most_steps() -> None:
    efficiency = Efficiency(Clock())
    efficiency.engine_ready(PEAKS)
    for _ in range(3):
        efficiency.step(worked("decode", 0.001, 10**9, 10**6))
    efficiency.step(worked("decode", 0.01, 10**9, 10**8))
    assert efficiency.last_minute()["decode"].bound_by == "memory"
    assert efficiency.seconds.values["decode", "compute"] == pytest.approx(0.003)


def test_only_the_newest_steps_are_kept_one_by_one() -> None:
    efficiency = Efficiency(Clock())
    efficiency.engine_ready(PEAKS)
    for number in range(NUM_NEWEST + 5):
        efficiency.step(msgspec.structs.replace(worked("decode", 0.01), step_num_rows=number))
    assert [step.num_rows for step in efficiency.newest()] == list(range(5, NUM_NEWEST + 5))


def test_messages_without_a_step_count_nothing() -> None:
    efficiency = Efficiency(Clock())
    efficiency.step(msgspec.structs.replace(worked("decode", 1.0), step_phase=None))
    efficiency.engine_ready(PEAKS)
    efficiency.step(worked("decode", 0.0))
    assert efficiency.last_minute() == {}
    assert set(efficiency.flops.values.values()) == {0.0}


def test_another_engine_begins_anew_and_its_counters_go_on() -> None:
    efficiency = Efficiency(Clock())
    efficiency.engine_ready(PEAKS)
    efficiency.step(worked("decode", 0.01))
    efficiency.engine_ready(Peaks(2e10, 2e12))
    assert (efficiency.last_minute(), efficiency.newest()) == ({}, [])
    efficiency.step(worked("decode", 0.01))
    assert efficiency.last_minute()["decode"].mfu == pytest.approx(0.05)
    assert efficiency.flops.values["decode",] == 2e9


def test_a_step_before_an_engine_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="before the engine was ready"):
        Efficiency(Clock()).step(worked("decode", 0.01))
