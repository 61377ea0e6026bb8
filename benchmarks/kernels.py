"""Compares every op in every implementation that can run: time, bytes and operations a second, and the distance from
the machine's peak.

    python benchmarks/kernels.py [--op linear,paged_attention] [--shape '1b'] [--quick] [--json FILE]

A case's floor is max(bytes / bandwidth, operations / rate), with the rates that `machine.py` measures first. "x ref" is
the speed relative to the plain implementation (the op's last). Weights and KV are larger than any cache.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import peers, tables
from benchmarks.kernel_cases import Case, all_cases
from benchmarks.machine import Machine, describe, measure_machine
from inferd.kernels.cpu import library, native
from inferd.kernels.registry import KernelError

_MIN_RUNS, _MAX_RUNS = 3, 200
_MIN_DURATION_S, _MAX_DURATION_S = 0.15, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One implementation of one case."""

    op: str
    shape: str
    precision: str
    implementation: str
    median_us: float
    best_us: float
    floor_us: float
    gb_per_s: float
    gflop_per_s: float
    times_reference: float | None
    """Speed relative to the op's last implementation."""

    @property
    def share(self) -> float:
        """Share of the machine's peak; above 1 if the data of a small case fits a cache."""
        return self.floor_us / self.median_us


def time_case(case: Case, machine: Machine) -> list[Timing]:
    """Every implementation that can run, best first."""
    taken: dict[str, list[float]] = {}
    for name in case.op.implementation_names:
        case.op.force(name)
        try:
            call = case.make()
            call()
        except KernelError:
            continue
        finally:
            case.op.force(None)
        taken[name] = _time(call, case, name)
    reference = taken.get(case.op.implementation_names[-1])
    return [_timing(case, machine, name, runs_s, reference) for name, runs_s in taken.items()]


def _time(call: Callable[[], object], case: Case, name: str) -> list[float]:
    """Seconds of each run. An op that chooses when called keeps its choice during the runs."""
    case.op.force(name)
    try:
        call()
        runs_s: list[float] = []
        while not _is_enough(runs_s):
            started_s = time.perf_counter()
            call()
            runs_s.append(time.perf_counter() - started_s)
        return runs_s
    finally:
        case.op.force(None)


def _is_enough(runs_s: list[float]) -> bool:
    """Whether to stop: one run suffices if a plain implementation of a large case takes seconds."""
    if sum(runs_s) > _MAX_DURATION_S or len(runs_s) == _MAX_RUNS:
        return True
    return len(runs_s) >= _MIN_RUNS and sum(runs_s) > _MIN_DURATION_S


def _timing(case: Case, machine: Machine, name: str, runs_s: list[float], reference_s: list[float] | None) -> Timing:
    median_s = statistics.median(runs_s)
    rates = peers.rates_of(machine, case.precision if case.precision in ("int8", "int4") else "bf16")
    return Timing(
        op=case.op.name,
        shape=case.shape,
        precision=case.precision,
        implementation=name,
        median_us=median_s * 1e6,
        best_us=min(runs_s) * 1e6,
        floor_us=max(case.num_bytes / rates.read_bytes, case.num_flops / rates.flops) * 1e6,
        gb_per_s=case.num_bytes / median_s / 1e9,
        gflop_per_s=case.num_flops / median_s / 1e9,
        times_reference=statistics.median(reference_s) / median_s if reference_s else None,
    )


def render(timings: list[Timing]) -> str:
    """One table for each op."""
    parts = []
    for op in dict.fromkeys(timing.op for timing in timings):
        rows: list[list[tables.Cell]] = [
            [
                timing.shape,
                timing.precision,
                timing.implementation,
                timing.median_us,
                timing.best_us,
                timing.gb_per_s,
                timing.gflop_per_s or None,
                f"{timing.share:.0%}",
                timing.times_reference,
            ]
            for timing in timings
            if timing.op == op
        ]
        columns = ["precision", "implementation", "median us", "best us", "GB/s", "GFLOP/s", "of floor", "x ref"]
        parts.append(tables.markdown([op, *columns], rows))
    return "\n\n".join(parts)


def _selected(asked: argparse.Namespace) -> Iterator[Case]:
    for case in all_cases(quick=asked.quick):
        if (not asked.op or case.op.name in asked.op) and re.search(asked.shape, case.shape):
            yield case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--op", type=lambda text: text.split(","), default=[], help="comma list of ops, named as in the tables"
    )
    parser.add_argument("--shape", default="", help="regular expression to find in the shape's name")
    parser.add_argument("--quick", action="store_true", help="a few small cases: shows that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    machine = measure_machine(quick=asked.quick)
    torch.set_num_threads(machine.num_threads)
    torch.manual_seed(0)
    built = native.prepare(library.default_cache_dir())
    kernels = built.reason or f"C++ kernels for {built.level}"
    print(f"{describe(machine)}; {kernels}\n", flush=True)
    timings: list[Timing] = []
    with torch.inference_mode():
        for case in _selected(asked):
            timings += time_case(case, machine)
            print(f"\r{len(timings)} timed", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(render(timings))
    if asked.json is not None:
        found: dict[str, Any] = {"machine": asdict(machine), "kernels": kernels, "timings": list(map(asdict, timings))}
        asked.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
