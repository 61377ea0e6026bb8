"""The small operations between the products, from the benchmarks' own cases: norms, rotation, gates, sampling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import kernel_cases
from benchmarks.gpu.bench import Bench, distance
from benchmarks.gpu.points import Case, Phase, Trial
from inferd.kernels.ops.top_k_top_p import TOP_K_TOP_P
from inferd.kernels.registry import KernelError

TOLERANCE = 1e-2
_CALLS = 32


def small(bench: Bench) -> None:
    """Every implementation, checked against the plain one. One set of inputs stays in the cache, as a layer's does."""
    with torch.device(bench.device):
        recurrent = kernel_cases.recurrent_cases(bench.pick((1, 8, 32), (1,)))
        for case in (*kernel_cases.small_cases(bench.pick((1, 32, 256), (1,))), *recurrent):
            if case.op is TOP_K_TOP_P:  # returns nothing to compare, because it works in place: see `sampling`
                continue
            for name in case.op.implementation_names:
                labels = {"op": case.op.name, "shape": case.shape, "by": name}
                asked = Case(table="small kernels", labels=labels, phases=(Phase(case.num_bytes),))
                if bench.is_listing or _runs(case, name):
                    bench.measure(asked, partial(_trial, bench, case, name))


def _runs(case: kernel_cases.Case, name: str) -> bool:
    try:
        _first(case, name)
    except KernelError:
        return False
    return True


def _first(case: kernel_cases.Case, name: str) -> tuple[Tensor, Callable[[], object]]:
    """The implementation's result on inputs shared by all."""
    torch.manual_seed(0)
    case.op.force(name)
    try:
        call = case.make()
        out = call()
    finally:
        case.op.force(None)
    assert isinstance(out, Tensor)
    return out, call


def _trial(bench: Bench, case: kernel_cases.Case, name: str) -> Trial:
    expected, _ = _first(case, case.op.implementation_names[-1])
    out, call = _first(case, name)
    error = distance(out, expected)
    if not error <= TOLERANCE:
        return Trial(error=error, tolerance=TOLERANCE)
    case.op.force(name)
    try:
        timing = bench.clock(lambda: [call] * _CALLS)
    finally:
        case.op.force(None)
    return Trial(seconds=timing.seconds, error=error, tolerance=TOLERANCE, note=timing.note)
