"""Measures a machine and prints one line of JSON. `machine.py` runs it.

A process of its own, so that later measurements do not share its memory or threads. Imports nothing of inferd.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

_ROWS, _IN_SIZE, _OUT_SIZE = 256, 2048, 8192

Rate = dict[str, float]


def measure(*, quick: bool) -> dict[str, object]:
    """The fields of `machine.Machine`."""
    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(num_threads)
    num_reads, num_products = (4, 4) if quick else (12, 24)
    return {
        "num_threads": num_threads,
        "processor": _processor(),
        "torch": torch.__version__,
        "read_bytes": _read_rate(1 << (26 if quick else 30), num_reads),
        "bf16_flops": _product_rate(_bf16_product(), num_products),
        "int8_ops": _int8_rate(num_products),
    }


def _read_rate(num_bytes: int, num_runs: int) -> Rate:
    data = torch.ones(num_bytes // 4)
    return _per_s(data.sum, num_bytes, num_runs)


def _bf16_product() -> Callable[[], object]:
    x = torch.randn(_ROWS, _IN_SIZE).to(torch.bfloat16)
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(_OUT_SIZE, _IN_SIZE).to(torch.bfloat16), _ROWS)
    return lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _int8_rate(num_runs: int) -> Rate | None:
    """Rate of products of uint8 rows by int8 weights with fp32 results; None if this torch has none."""
    try:
        weight = torch.randint(-127, 128, (_OUT_SIZE, _IN_SIZE), dtype=torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(weight, [_ROWS, _IN_SIZE])
        x = torch.randint(0, 256, (_ROWS, _IN_SIZE), dtype=torch.uint8)
        scales, zeros = torch.full((_OUT_SIZE,), 0.01), torch.zeros(_OUT_SIZE, dtype=torch.int64)

        def product() -> object:
            return torch.ops.onednn.qlinear_pointwise(
                x, 0.01, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
            )

        product()
    except (AttributeError, RuntimeError):
        return None
    return _product_rate(product, num_runs)


def _product_rate(product: Callable[[], object], num_runs: int) -> Rate:
    return _per_s(product, 2 * _ROWS * _IN_SIZE * _OUT_SIZE, num_runs)


def _per_s(run: Callable[[], object], amount: float, num_runs: int) -> Rate:
    """Rate of runs that each do `amount`, after two warm-up runs."""
    run(), run()
    taken_s = []
    for _ in range(num_runs):
        started_s = time.perf_counter()
        run()
        taken_s.append(time.perf_counter() - started_s)
    return {"best": amount / min(taken_s), "median": amount / statistics.median(taken_s)}


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown processor"
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, "unknown processor")


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps(measure(quick="--quick" in sys.argv)))
