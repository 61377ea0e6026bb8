"""Weights in 4 bits, quantized when they are complete: half a byte a weight and two bytes for each group of 32."""

from __future__ import annotations

from torch import Tensor

from inferd.engine.quant.scheme import Apply, FromWeight, QuantizationError
from inferd.kernels.linear_int4 import GROUP_SIZE, linear_int4, quantize_int4


class Int4(FromWeight):
    """A scale for each group of inputs of an output row, and 8 bit activations in the same groups."""

    name = "int4"

    def check(self, out_size: int, in_size: int) -> None:
        if in_size % GROUP_SIZE:
            raise QuantizationError(
                f"int4 takes inputs in groups of {GROUP_SIZE}, and a layer of {out_size} x {in_size} has "
                f"{in_size % GROUP_SIZE} left over: serve it in int8 or unquantized"
            )

    def bind(self, weight: Tensor, bias: Tensor | None) -> Apply:
        q, scales = quantize_int4(weight)
        return linear_int4(q, scales, bias, weight.dtype)
