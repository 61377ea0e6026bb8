"""Weights in 8 bits, quantized when they are complete: one byte a weight and four for each output row."""

from __future__ import annotations

from torch import Tensor

from inferd.engine.quant.scheme import Apply, FromWeight, QuantizationError
from inferd.kernels.linear_int8 import MAX_IN_SIZE, linear_int8, quantize_int8


class Int8(FromWeight):
    """A scale for each output row, and one for each row of activations as it comes."""

    name = "int8"

    def check(self, out_size: int, in_size: int) -> None:
        if in_size > MAX_IN_SIZE:
            raise QuantizationError(
                f"int8 takes at most {MAX_IN_SIZE} inputs, whose sum fits 32 bits, and a layer of "
                f"{out_size} x {in_size} has more: serve it unquantized"
            )

    def bind(self, weight: Tensor, bias: Tensor | None) -> Apply:
        q, scales = quantize_int8(weight)
        return linear_int8(q, scales, bias, weight.dtype)
