"""Ways to quantize activations to FP8: row by row, in groups of inputs, or by a scale from calibration. Also a layer
that quantizes before it multiplies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import pages
from inferd.kernels.ops.linear_fp8.reference import BLOCK
from inferd.kernels.ops.quantize_fp8 import quantize_fp8
from inferd.kernels.ops.quantize_fp8.reference import E4M3_MAX

Activations = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x [T, in] -> (q [T, in] e4m3, scales fp32: [T], or [T, groups of in])."""

Multiply = Callable[[Tensor, Tensor, torch.dtype], Tensor]
"""(q, scales) of activations and the dtype of results -> results [T, out]."""

_PIECE = 2**24
"""Numbers of a weight quantized at once: their fp32 copies take 64 MiB."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with a scale for each row."""
    return quantize_fp8(x)


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with a scale for each 128 inputs of a row. The last group may be shorter."""
    return quantize_fp8(x, has_groups=True)


def quantize_static(scale: float) -> Activations:
    """Quantize with one scale for every row. Values beyond 448 times the scale are cut to that."""

    def apply(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = (x.to(torch.float32) / scale).clamp_(-E4M3_MAX, E4M3_MAX)
        return wide.to(torch.float8_e4m3fn), torch.full((x.shape[0],), scale, dtype=torch.float32, device=x.device)

    return apply


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] of any float dtype -> (q [out, in] e4m3, scales [out, groups of in] fp32), a piece at a time."""
    out_size, in_size = weight.shape
    num_rows = max(1, _PIECE // in_size)

    def fill(q: Tensor, scales: Tensor) -> None:
        for row in range(0, out_size, num_rows):
            piece = slice(row, row + num_rows)
            q[piece], scales[piece] = quantize_groups(weight[piece])

    groups = (out_size, -(-in_size // BLOCK))
    q, scales = pages.scratch(
        [((out_size, in_size), torch.float8_e4m3fn), (groups, torch.float32)], fill, weight.device
    )
    return q, scales


@dataclass(frozen=True, slots=True)
class Product:
    """A layer that quantizes its activations, unless a kernel before it has done so."""

    quantize: Activations
    multiply: Multiply
    fused_groups: bool | None
    """How a kernel before may quantize for `multiply`: with a scale for each 128 inputs (True), or for each row
    (False). None: not at all. A scale from calibration has no fused kernel, and processors have none either."""

    @classmethod
    def on(cls, device: torch.device, quantize: Activations, multiply: Multiply) -> Product:
        kinds: dict[Activations, bool] = {quantize_rows: False, quantize_groups: True}
        return cls(quantize, multiply, None if gpu.refuses(device.type) else kinds.get(quantize))

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(*self.quantize(x), x.dtype)

    def groups_of(self, num_rows: int) -> bool | None:
        """`fused_groups` of so many rows."""
        return self.fused_groups
