"""A linear layer on a GPU: a kernel for few rows, the vendor's library for many, and the choice between them.

Each call with few rows asks the table, so the table may be completed after layers are bound. A CUDA graph replays such
calls as they were recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.gpu import early_starts
from inferd.kernels.gpu.few_rows import few_rows
from inferd.kernels.ops.linear import Choices, plain
from inferd.kernels.ops.linear.fused import Gate
from inferd.kernels.ops.linear.tuning import FEW_ROWS, LIBRARY, Case, Table, bucket, cases

_RUNS, _CALLS = 15, 8
"""Replays that are timed, and the least number of calls in one."""
_MAX_WEIGHTS = 48


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
        return _seconds(partial(product, x), weight)

    return {FEW_ROWS: partial(measured, few_rows), LIBRARY: partial(measured, torch.nn.functional.linear)}


def _seconds(product: Callable[[Tensor], object], weight: Tensor) -> float:
    """Seconds of one product within a CUDA graph of several, the median of replays. A host that queued them one by one
    could take longer than the device, above all for Triton: 25 to 30 us. Copies of a small weight take turns, so that
    each product reads its weight from memory and not from the caches. Kernels start early, as in recorded steps."""
    cache_bytes = torch.cuda.get_device_properties(weight.device).L2_cache_size
    num_copies = num_weights(weight.numel() * weight.element_size(), cache_bytes)
    weights = [weight, *(weight.clone() for _ in range(num_copies - 1))]
    calls = [partial(product, each) for each in weights * -(-_CALLS // num_copies)]
    with early_starts() if gpu.properties_of(weight.device).starts_early else nullcontext():
        graph = _captured(calls)
    taken: list[float] = []
    for _ in range(_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return median(taken)


def num_weights(weight_bytes: int, cache_bytes: int) -> int:
    """Number of equal weights that take turns, so that others of twice the cache's size are read between two uses. Of
    weights of less than 2 or 3 MB there are too few: a model of such weights is in the cache when it serves, too."""
    if weight_bytes > 2 * cache_bytes:
        return 1
    return min(_MAX_WEIGHTS, 1 + -(-2 * cache_bytes // weight_bytes))


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls. They run once before, because kernels are compiled and workspaces made then."""
    stream, current = _stream(torch.cuda.current_device()), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        calls[0]()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local, as when the worker records steps: another thread may ask the driver something meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
    except RuntimeError:
        # If a capture cannot be ended, torch keeps its stream the current one.
        torch.cuda.set_stream(current)
        _stream.cache_clear()
        raise
    graph.replay()
    return graph


@functools.cache
def _stream(device_index: int) -> torch.cuda.Stream:
    """The stream of all captures on a device. cuBLAS keeps a workspace for each stream that it was called on: tens of
    MiB, for each of up to 32 streams that torch would give in turn."""
    return torch.cuda.Stream(device_index)  # type: ignore[no-untyped-call]
