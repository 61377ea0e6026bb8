"""Products of few rows with neighbouring operations: in one kernel, and in several with either product of few rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.linears import Apply, checked, cold_weights, few_rows, shapes
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.points import Case, Phase, Trial
from inferd.kernels.ops.gated_mul import silu_mul
from inferd.kernels.ops.linear import fused as fused_ops
from inferd.kernels.ops.linear.fused import gate_up_act, linear_residual, norm_linear
from inferd.kernels.ops.rms_norm import rms_norm
from inferd.kernels.ops.scaled_add import added

TOLERANCE = 8e-3
"""Largest error against fp64: a rounding of the result and one between the parts."""
_EPS = 1e-5
_OPS = (fused_ops.NORM_LINEAR, fused_ops.LINEAR_RESIDUAL, fused_ops.GATE_UP_ACT)
_FUSED, _FEW_ROWS, _LIBRARY = "one kernel", "in turn, few rows", "in turn, library"


def layers(bench: Bench, model: str, rows: Sequence[int]) -> None:
    """A layer's products with the norm before and the gate or the sum after them."""
    sizes = shapes(MODELS[bench.pick(model, "smoke")])
    for name, num_rows, by in itertools.product(
        ("norm + qkv", "o + residual", "norm + gate_up + silu", "down + residual"),
        rows,
        (_FUSED, _FEW_ROWS, _LIBRARY),
    ):
        in_size, out_size = sizes[name.replace("norm + ", "").split(" ")[0]]
        moved = 2.0 * in_size * out_size + 2.0 * num_rows * (in_size + 2 * out_size)
        case = Case(
            table="fused linears, bf16",
            labels={"what": f"{model} {name}", "rows": str(num_rows), "by": by},
            phases=(Phase(moved, 2.0 * in_size * out_size * num_rows),),
        )
        if bench.is_listing or by == _LIBRARY or bench.device.type == "cuda":
            bench.measure(case, partial(_trial, bench, name, in_size, out_size, num_rows, by))


@dataclass(frozen=True, slots=True)
class _Around:
    """The operations around a product, by name, with their inputs."""

    name: str
    x: Tensor
    norm: Tensor
    residual: Tensor

    def fused(self, weight: Tensor) -> Tensor:
        if "residual" in self.name:
            return linear_residual(self.x, weight, None, self.residual)
        if "silu" in self.name:
            return gate_up_act(self.x, weight, "silu", self.norm, _EPS)
        return norm_linear(self.x, self.norm, _EPS, weight)

    def in_turn(self, product: Apply) -> Tensor:
        if "residual" in self.name:
            return added(product(self.x), self.residual)
        projected = product(rms_norm(self.x, self.norm, _EPS))
        return silu_mul(projected) if "silu" in self.name else projected

    def exactly(self, weight: Tensor) -> Tensor:
        """The result in fp64."""
        x, weight = self.x.double(), weight.double()
        if "residual" in self.name:
            return x @ weight.T + self.residual.double()
        normed = x / (x.square().mean(-1, keepdim=True) + _EPS).sqrt() * self.norm.double()
        projected = normed @ weight.T
        if "silu" not in self.name:
            return projected
        gate, up = projected.chunk(2, -1)
        return functional.silu(gate) * up


def _trial(bench: Bench, name: str, in_size: int, out_size: int, rows: int, by: str) -> Trial:
    weights = list(cold_weights(bench, in_size, out_size))
    around = _Around(
        name,
        x=torch.randn(rows, in_size, dtype=torch.bfloat16, device=bench.device),
        norm=torch.rand(in_size, dtype=torch.bfloat16, device=bench.device) + 0.5,
        residual=torch.randn(rows, out_size, dtype=torch.bfloat16, device=bench.device),
    )
    if by == _FUSED:
        calls = [partial(around.fused, weight) for weight in weights]
        for op in _OPS:
            op.force("triton")
    else:
        bind = few_rows if by == _FEW_ROWS else _library
        calls = [partial(around.in_turn, bind(weight)) for weight in weights]
    try:
        return checked(bench, calls, around.exactly(weights[0]), TOLERANCE)
    finally:
        for op in _OPS:
            op.force(None)


def _library(weight: Tensor) -> Apply:
    return lambda x: functional.linear(x, weight)
