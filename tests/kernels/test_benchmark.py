"""The kernel benchmark's cases can call every op: a changed signature fails here, before somebody runs the
benchmark."""

from __future__ import annotations

import pytest

from benchmarks.kernel_cases import all_cases
from benchmarks.kernels import render, time_case
from benchmarks.peers import REFERENCE
from inferd.kernels import registry


@pytest.mark.sampled(keep=2, among="long checks of all kernels")
def test_every_case_runs_in_every_implementation() -> None:
    cases = list(all_cases(quick=True))
    timings = [timing for case in cases for timing in time_case(case, REFERENCE)]
    for case in cases:
        found = [t for t in timings if (t.op, t.shape) == (case.op.name, case.shape)]
        assert found[-1].implementation == case.op.implementation_names[-1] and found[-1].times_reference == 1.0
        assert all(timing.floor_us > 0 and timing.median_us >= timing.best_us > 0 for timing in found)
    assert all(timing.op in render(timings) for timing in timings)
    forced = [op.name for op in registry.ops().values() if op._forced is not None]
    assert not forced, f"the benchmark left {forced} forced"
