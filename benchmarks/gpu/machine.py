"""The device's description and its peak rates, on which all floors rest."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl

from benchmarks.gpu.bench import Bench, distance
from benchmarks.gpu.points import Case, Trial
from inferd.kernels import gpu
from inferd.kernels.device import SHARED_BYTES

RATES = "rates"
"""The table that `report.rates_of` reads."""
NUM_EMPTY = 320
"""Ten kernels a layer in 32 layers."""


def rates(bench: Bench) -> None:
    """Copy and read bandwidth, and products of large matrices in bf16, and in FP8 if the device has it. Numbers are
    random, because zeros are faster."""
    _rate(bench, "copy", "bytes/s", lambda: _copy(bench))
    _rate(bench, "read", "bytes/s", lambda: _read(bench))
    _rate(bench, "bf16", "flop/s", lambda: _product(bench, torch.bfloat16))
    if bench.has_fp8:
        _rate(bench, "fp8", "flop/s", lambda: _product(bench, torch.float8_e4m3fn))


def describe_device(bench: Bench) -> None:
    """Name, driver and versions, in the note."""
    bench.measure(Case(table="machine", labels={"what": str(bench.device)}), lambda: Trial(note=_description(bench)))


def _description(bench: Bench) -> str:
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}"
    if bench.device.type != "cuda":
        return f"{platform.processor() or platform.machine()}, {versions}"
    found = torch.cuda.get_device_properties(bench.device)
    capability = f"{found.major}.{found.minor}"
    return (
        f"{found.name}, {found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} SMs, "
        f"compute capability {capability}, CUDA {torch.version.cuda}, {versions}"
    )


def precompile(bench: Bench) -> None:
    """Compile every form of every kernel for this device, in a process for each core, so that later rows find them in
    Triton's cache. It fails if a form spills or lacks the instructions that it should have."""
    bench.measure(Case(table="compilation", labels={"what": "every form of every kernel"}), lambda: _compile(bench))


def _compile(bench: Bench) -> Trial:
    if bench.device.type != "cuda":
        return Trial(note="compiled without a GPU by the dry run")
    device = gpu.properties_of(bench.device)
    sm = device.sm
    if not device.is_known:
        known = ", ".join(f"sm_{known}" for known in SHARED_BYTES)
        return Trial(note=f"compiled when first used: forms are judged for {known}, and this is sm_{sm}")
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "compiled.json"
        asked = ["--sm", str(sm), "--jobs", str(os.cpu_count() or 1), "--write", str(table)]
        command = [sys.executable, "-P", "-m", "inferd.kernels.compile.aot", *asked]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        forms = json.loads(table.read_text())["rows"] if table.exists() else []
    seconds = time.monotonic() - started_s
    faulty = sum(bool(form["faults"]) for form in forms)
    if not forms:
        return Trial(error=float("inf"), tolerance=0.0, note=done.stdout[-500:])
    return Trial(seconds=seconds, error=float(faulty), tolerance=0.0, note=f"{len(forms)} forms, {faulty} with faults")


def _rate(bench: Bench, what: str, unit: str, run: Callable[[], tuple[float, float]]) -> None:
    """`run` gives (amount, seconds)."""

    def trial() -> Trial:
        amount, seconds = run()
        return Trial(seconds=seconds, figures={unit: amount / seconds})

    bench.measure(Case(table=RATES, labels={"what": what}), trial)


def _copy(bench: Bench) -> tuple[float, float]:
    source = torch.empty(bench.pick(1 << 31, 1 << 20), dtype=torch.bfloat16, device=bench.device).normal_()
    target = torch.empty_like(source)
    timing = bench.clock(lambda: [lambda: target.copy_(source)] * 4)
    return 2.0 * source.numel() * 2, timing.seconds


def _read(bench: Bench) -> tuple[float, float]:
    source = torch.empty(bench.pick(1 << 30, 1 << 20), device=bench.device).normal_()
    timing = bench.clock(lambda: [source.sum] * 4)
    return 4.0 * source.numel(), timing.seconds


def _product(bench: Bench, dtype: torch.dtype) -> tuple[float, float]:
    size = bench.pick(8192, 64)
    a, b = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
    if dtype == torch.bfloat16:
        timing = bench.clock(lambda: [lambda: torch.mm(a, b.T)] * 4)
    else:
        one = torch.ones((), device=bench.device)
        product = lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)  # noqa: E731
        timing = bench.clock(lambda: [product] * 4)
    return 2.0 * size**3, timing.seconds


@triton.jit
def _empty(out, count):  # type: ignore[no-untyped-def]
    """Has no visible effect: `count` is 0."""
    if count > 0:
        tl.store(out, count)


def empty_kernels(bench: Bench) -> None:
    """The cost of launches alone in a graph, with and without programmatic dependent launch."""
    kinds: dict[str, dict[str, bool]] = {"plain": {}, "launch_pdl": {"launch_pdl": True}}
    for label, options in kinds.items():
        labels = {"kernels": str(NUM_EMPTY), "launch": label}
        bench.measure(Case(table="empty kernels in one graph", labels=labels), partial(_time_empty, bench, options))


def _time_empty(bench: Bench, options: dict[str, bool]) -> Trial:
    if bench.device.type != "cuda":
        return Trial(note="launches are a GPU's")
    out = torch.zeros(1, dtype=torch.int32, device=bench.device)
    timing = bench.clock(lambda: [lambda: _empty[(1,)](out, 0, **options)] * NUM_EMPTY)
    error = distance(out + 1, torch.ones_like(out))
    figures = {"us a kernel": timing.seconds * 1e6}
    return Trial(seconds=timing.seconds * NUM_EMPTY, error=error, tolerance=0.0, figures=figures, note=timing.note)
