"""4 bits measured on other groups than the file's own.

The weights of `smollm2` come from a file of 4 bits in groups of 32, so int4 finds every one of them again. That says
nothing of other models. Here each matrix takes its inputs in a random order, so a group holds weights of 32 groups of
the file, and no grid of 16 values fits them. The order changes no product.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.quality.packing import NearestNumbers
from inferd.engine.quant.integer import Int4, Int8
from inferd.engine.quant.recipe import Recipe
from inferd.engine.quant.scheme import Apply, giving
from inferd.kernels.ops.linear_int4 import GROUP_SIZE, linear_int4, quantize_int4


class ShuffledInt4(Int4):
    """Int4 of the inputs in a random order, or a symmetric form: no minimums, scales in bfloat16."""

    def __init__(self, *, is_symmetric: bool = False) -> None:
        self._is_symmetric = is_symmetric

    def bind(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Apply:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
        shuffled, minimums = weight[:, order], None
        if self._is_symmetric:
            rows, columns = shuffled.shape
            rounded = NearestNumbers(shuffled).integers(
                rows, columns, 4, GROUP_SIZE, torch.bfloat16, True, torch.arange(columns)
            )
            q, scales = rounded[0].to(torch.uint8), rounded[2]
        else:
            q, scales, minimums = quantize_int4(shuffled)
        bind = partial(linear_int4, q, scales, bias, minimums=minimums, order=order.to(torch.int32))
        return giving(out_dtype, weight.dtype, bind)


SHUFFLED_INT4 = Recipe(ShuffledInt4(), Int8())
SYMMETRIC_INT4 = Recipe(ShuffledInt4(is_symmetric=True), Int8())
