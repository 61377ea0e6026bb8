"""A linear layer on a GPU: a kernel for few rows, the vendor's library for many, and the choice between them.

Each call with few rows asks the table, so the table may be completed after layers are bound. A CUDA graph replays such
calls as they were recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from inferd.kernels.linear import Choices, plain
from inferd.kernels.linear.fused import Gate
from inferd.kernels.linear.tuning import FEW_ROWS, LIBRARY, Case, Table, bucket, cases
from inferd.kernels.triton_few_rows import few_rows

_WARM_UPS, _RUNS = 5, 20


_RULE = Table("any")
"""A table without measurements, so that the rule decides."""


class Product:
    """x W^T + b. Offers the measurements of this weight to the table in `choices`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, choices: Choices, out_dtype: torch.dtype) -> None:
        self.weight, self.bias, self._out_dtype = weight.contiguous(), bias, out_dtype
        self.scales: Tensor | None = None
        self._table = choices.table or _RULE
        out_size, in_size = weight.shape
        self._cases = {case.num_rows: case for case in cases(out_size, in_size, str(weight.dtype))}
        if choices.table is not None:
            for case in choices.table.missing(self._cases.values()):
                choices.table.offer(case, _measurements(case, self.weight))

    def is_few(self, num_rows: int) -> bool:
        """Whether the kernel for few rows multiplies so many rows."""
        size = bucket(num_rows)
        return size is not None and self._table.choice(self._cases[size]) == FEW_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_few(x.shape[0]):
            return few_rows(x, self.weight, self.bias, out_dtype=self._out_dtype)
        return plain(x, self.weight, self.bias, self._out_dtype)


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, scales: Tensor | None
) -> Tensor:
    return few_rows(x, weight, bias, norm=norm, eps=eps, scales=scales)


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, scales: Tensor | None) -> Tensor:
    return few_rows(x, weight, bias, residual=residual, scales=scales)


def gate_up_act(
    x: Tensor, norm: Tensor | None, eps: float, weight: Tensor, gate: Gate, scales: Tensor | None
) -> Tensor:
    return few_rows(x, weight, norm=norm, eps=eps, gate=gate, scales=scales)


def _measurements(case: Case, weight: Tensor) -> dict[str, Callable[[], float]]:
    """Seconds of each product of `weight` with the case's number of rows, on the weight's device."""

    def measured(product: Callable[[Tensor, Tensor], Tensor]) -> float:
        x = torch.randn(case.num_rows, case.in_size, dtype=weight.dtype, device=weight.device)
        return _seconds(partial(product, x, weight), weight.device)

    return {FEW_ROWS: partial(measured, few_rows), LIBRARY: partial(measured, torch.nn.functional.linear)}


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median time of runs that read the weight from memory and not from the caches: a write of twice the L2 cache
    precedes each."""
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
