"""Weights in 8-bit floating point: quantized while loading, or as the checkpoint stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inferd.engine.arch.sharding import Span
from inferd.engine.quant.scheme import Apply, FromWeight, TensorSpec, giving
from inferd.kernels.ops.linear_fp8 import BLOCK, FP8, linear_fp8, quantize_static, quantize_weight


class Fp8(FromWeight):
    """A scale for each group of 128 inputs of an output row. On GPUs activations have one for each of the same groups,
    found in each step."""

    name = "fp8"
    input_group: int | None = BLOCK

    def __init__(self, is_invariant: bool = False) -> None:
        self._is_invariant = is_invariant

    def check(self, out_size: int, in_size: int) -> None:
        """Every shape is allowed."""

    def bind(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Apply:
        q, scales = quantize_weight(weight)
        bind = partial(linear_fp8, q, scales, bias, is_invariant=self._is_invariant)
        return giving(out_dtype, weight.dtype, bind)


@dataclass(frozen=True, slots=True)
class StoredFp8:
    """The checkpoint's own format: a scale for each output row or for each block of 128 x 128. On GPUs the activations'
    scale comes from calibration (`has_input_scale`), or is found for each row when it is computed."""

    dtype: torch.dtype
    """Dtype of activations and results."""
    has_blocks: bool = False
    has_input_scale: bool = False
    is_invariant: bool = False
    """Whether a row's bits depend on that row alone, on a GPU too."""
    name: str = "stored fp8"

    @property
    def input_group(self) -> int | None:
        return BLOCK if self.has_blocks else 1

    def check(self, out_size: int, in_size: int) -> None:
        """Every shape is allowed."""

    def takes(self, out_size: int, in_size: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        scales = (-(-out_size // BLOCK), -(-in_size // BLOCK)) if self.has_blocks else (out_size, 1)
        given = {
            "weight": TensorSpec((out_size, in_size), FP8),
            "weight_scale": TensorSpec(
                scales,
                torch.float32,
                group_rows=BLOCK if self.has_blocks else 1,
                group_columns=BLOCK if self.has_blocks else None,
            ),
        }
        if self.has_input_scale:
            given["input_scale"] = TensorSpec((out_size, 1), torch.float32, group_columns=None)
        return given

    def of_rows(self, rows: Sequence[Span]) -> StoredFp8:
        """Rows, or blocks of them, are stored independently of each other."""
        return self

    def bind(
        self,
        weight: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor,
        input_scale: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Apply:
        """`input_scale` [out, 1] holds, for each row, the scale of the stored tensor that the row came from. Fused
        matrices see the same activations, so the largest of their scales holds for all."""
        scales = weight_scale if self.has_blocks else weight_scale.squeeze(1)
        quantize = None if input_scale is None else quantize_static(float(input_scale.max()))
        bind = partial(linear_fp8, weight, scales, bias, quantize=quantize, is_invariant=self.is_invariant)
        return giving(out_dtype, self.dtype, bind)
