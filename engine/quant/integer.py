"""Weights as integers of 8 or 4 bits, quantized while loading. On CPUs activations are quantized to 8 or 16 bits in
each step."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.engine.quant.scheme import Apply, FromWeight, QuantizationError
from inferd.kernels.ops.linear_int4 import GROUP_SIZE, linear_int4, quantize_int4
from inferd.kernels.ops.linear_int8 import GROUP_SIZE as INT8_GROUP_SIZE
from inferd.kernels.ops.linear_int8 import LONG_GROUP_SIZE, MAX_IN_SIZE, group_size, linear_int8, quantize_int8
from inferd.kernels.ops.quantized import X_GROUP_SIZES, has_wide_rows


class Int8(FromWeight):
    """One byte a weight and a 2-byte scale for each group of 64 inputs of an output row, or for each row if its inputs
    are no multiple of 64. On CPUs activations have a scale for each 32 inputs. With AMX an output row has one scale,
    and activations have 16 bits.

    `has_long_groups`: weights and activations have a scale for each 128 inputs, or 64 if 128 leave a remainder.
    Products of many rows then take 0.7 of the time (an Intel Xeon with VNNI). Vectors that All-MiniLM-L6 gives to
    paragraphs keep cosines of 0.9971 to those of float32, and of 0.9990 with short groups (2026-12-01)."""

    name = "int8"

    def __init__(self, is_invariant: bool = False, *, has_long_groups: bool = False) -> None:
        self._is_invariant, self._has_long_groups = is_invariant, has_long_groups
        self._most = LONG_GROUP_SIZE if has_long_groups else INT8_GROUP_SIZE
        self.input_group: int | None = self._most

    def check(self, out_size: int, in_size: int) -> None:
        if in_size > MAX_IN_SIZE:
            raise QuantizationError(
                f"int8 takes at most {MAX_IN_SIZE} inputs, because their sum must fit 32 bits, and a layer of "
                f"{out_size} x {in_size} has more: serve it unquantized"
            )

    def bind(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Apply:
        size = group_size(weight.shape[1], weight.device.type, self._most)
        is_long = self._has_long_groups and size in X_GROUP_SIZES and not has_wide_rows(weight.device.type)
        q, scales = quantize_int8(weight, size)
        return linear_int8(
            q,
            scales,
            bias,
            weight.dtype,
            x_group_size=size if is_long else None,
            out_dtype=out_dtype,
            is_invariant=self._is_invariant,
        )


class Int4(FromWeight):
    """Half a byte a weight, and a scale and a minimum of 2 bytes each for each group of 32 inputs of an output row.
    On CPUs activations have a scale for each of the same groups."""

    name = "int4"
    input_group: int | None = GROUP_SIZE

    def __init__(self, is_invariant: bool = False) -> None:
        self._is_invariant = is_invariant

    def check(self, out_size: int, in_size: int) -> None:
        if in_size % GROUP_SIZE:
            raise QuantizationError(
                f"int4 takes inputs in groups of {GROUP_SIZE}, and a layer of {out_size} x {in_size} has "
                f"{in_size % GROUP_SIZE} left over: serve it in int8 or unquantized"
            )

    def bind(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Apply:
        q, scales, minimums = quantize_int4(weight)
        return linear_int4(
            q, scales, bias, weight.dtype, minimums=minimums, out_dtype=out_dtype, is_invariant=self._is_invariant
        )
