"""A linear layer on a GPU: a kernel for few rows, the vendor's library for many, and what decides which are few."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from inferd.kernels.linear import Choices
from inferd.kernels.linear.fused import Gate
from inferd.kernels.linear.triton import few_rows
from inferd.kernels.linear.tuning import FEW_ROWS, LIBRARY, Table, bucket, cases

_WARM_UPS, _RUNS = 5, 20


def bind(weight: Tensor, bias: Tensor | None, choices: Choices) -> Callable[[Tensor], Tensor]:
    weight = weight.contiguous()
    out_size, in_size = weight.shape
    choice, known = (choices.table or Table("none")).choice, cases(out_size, in_size, str(weight.dtype))
    takes = {case.num_rows: choice(case) == FEW_ROWS for case in known}

    def apply(x: Tensor) -> Tensor:
        size = bucket(x.shape[0])
        if size is not None and takes[size]:
            return few_rows(x, weight, bias)
        return torch.nn.functional.linear(x, weight, bias)

    return apply


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return few_rows(x, weight, bias, norm=norm, eps=eps)


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return few_rows(x, weight, bias, residual=residual)


def gate_up_act(x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, gate: Gate) -> Tensor:
    return few_rows(x, weight, norm=norm, eps=eps, gate=gate)


def tune(table: Table, weight: Tensor) -> None:
    """Measure what `table` does not know of this weight's shape, on the weight's device."""
    out_size, in_size = weight.shape
    for case in table.missing(cases(out_size, in_size, str(weight.dtype))):
        x = torch.randn(case.num_rows, in_size, dtype=weight.dtype, device=weight.device)
        products = {FEW_ROWS: partial(few_rows, x, weight), LIBRARY: partial(torch.nn.functional.linear, x, weight)}
        table.measure(case, {name: partial(_seconds, product, weight.device) for name, product in products.items()})


def device_name() -> str:
    """Of the device and of what a measurement on it depends on besides."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of runs that find the weight in memory and not in the caches: each is behind a write of twice the L2
    cache."""
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    spoiled = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device)
    for _ in range(_WARM_UPS):
        run()
    taken: list[float] = []
    for _ in range(_RUNS):
        spoiled.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return median(taken)
