"""The peak rates of this machine's memory and cores, from which every floor is computed.

    python benchmarks/machine.py [--json] [--quick]

Read bandwidth is that of a sum over 1 GiB of float32, much larger than any cache. The matrix rates are those of
prepacked oneDNN products, 256 rows by [2048, 8192], in bfloat16 and in int8. It uses the cores that this process may
use. A child process measures; this module imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

_PROBE = Path(__file__).resolve().with_name("probe.py")


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate per second, from repeated measurements."""

    best: float
    median: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured rates; None if this processor or this torch has no such product."""

    num_threads: int
    processor: str
    torch: str
    read_bytes: Rate
    bf16_flops: Rate
    int8_ops: Rate | None


def measure_machine(*, quick: bool = False) -> Machine:
    """Measure in a child process. `quick` uses small sizes, only to show that it runs. Raises `CalledProcessError`."""
    command = [sys.executable, "-P", str(_PROBE), *(["--quick"] * quick)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    fields: dict[str, Any] = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout
    )
    rates = {name: value and Rate(**value) for name, value in fields.items() if isinstance(value, dict | None)}
    return Machine(**{**fields, **rates})


def place() -> str:
    """This machine and today's date, as in "2 cores, AMD EPYC 9R14, 24 GiB, 2026-11-21"."""
    num_cores = len(os.sched_getaffinity(0))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    memory_gib = round(psutil.virtual_memory().total / 2**30)
    return f"{num_cores} cores, {next(names, 'unknown processor')}, {memory_gib} GiB, {datetime.now(UTC):%Y-%m-%d}"


def best_of(machines: Sequence[Machine]) -> Machine:
    """Combine several measurements of one machine: the best of each quantity."""
    read, bf16 = _best([m.read_bytes for m in machines]), _best([m.bf16_flops for m in machines])
    int8 = _best([m.int8_ops for m in machines if m.int8_ops is not None])
    assert read is not None and bf16 is not None
    return Machine(machines[0].num_threads, machines[0].processor, machines[0].torch, read, bf16, int8)


def _best(rates: Sequence[Rate]) -> Rate | None:
    if not rates:
        return None
    return Rate(max(rate.best for rate in rates), statistics.median(rate.median for rate in rates))


def describe(machine: Machine) -> str:
    """One line with the rates that floors rest on."""
    int8 = f"{machine.int8_ops.best / 1e9:.0f} GOP/s int8" if machine.int8_ops else "no int8 product"
    return (
        f"{machine.num_threads} threads, {machine.processor}, torch {machine.torch}: reads "
        f"{machine.read_bytes.median / 1e9:.1f} GB/s (at best {machine.read_bytes.best / 1e9:.1f}), "
        f"{machine.bf16_flops.best / 1e9:.0f} GFLOP/s bf16, {int8}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the measurement as JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs, measures little")
    asked = parser.parse_args()
    machine = measure_machine(quick=asked.quick)
    print(json.dumps(asdict(machine)) if asked.json else describe(machine))


if __name__ == "__main__":
    main()
