"""4 bits measured on other groups than the file's own.

The weights of `smollm2` come from a file of 4 bits in groups of 32, so int4 finds every one of them again. That says
nothing of other models. Here each matrix takes its inputs in a random order, so a group holds weights of 32 groups of
the file, and no grid of 16 values fits them. The order changes no product.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from inferd.engine.quant.integer import Int4, Int8
from inferd.engine.quant.recipe import Recipe
from inferd.engine.quant.scheme import Apply, giving
from inferd.kernels.linear_int4 import GROUP_SIZE, linear_int4, quantize_int4

_TRIED = (-7.0, -7.5, -8.0, -8.5)
"""Values of the largest weight of a symmetric group, of which the best is taken."""


class ShuffledInt4(Int4):
    """Int4 of the inputs in a random order, or a symmetric form: no minimums, scales in bfloat16."""

    def __init__(self, *, is_symmetric: bool = False) -> None:
        self._is_symmetric = is_symmetric

    def bind(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Apply:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
        shuffled, minimums = weight[:, order], None
        if self._is_symmetric:
            q, scales = symmetric(shuffled)
        else:
            q, scales, minimums = quantize_int4(shuffled)
        bind = partial(linear_int4, q, scales, bias, minimums=minimums, order=order.to(torch.int32))
        return giving(out_dtype, weight.dtype, bind)


def symmetric(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(q [out, in], scales [out, in / 32]): w is about scale * (q - 8). The scale with the least error is taken."""
    groups = weight.float().reshape(weight.shape[0], -1, GROUP_SIZE)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = torch.cat([extreme / tried for tried in _TRIED], 2).to(torch.bfloat16)
    tries = [_rounded(groups, scales[:, :, index, None]) for index in range(len(_TRIED))]
    errors = torch.stack([(q * scales[:, :, index, None] - groups).square().sum(2) for index, q in enumerate(tries)])
    best = errors.argmin(0)
    scales = scales.gather(2, best.unsqueeze(2))
    return (_rounded(groups, scales) + 8).to(torch.uint8).flatten(1), scales.squeeze(2)


def _rounded(groups: Tensor, scales: Tensor) -> Tensor:
    return (groups / scales).round().clamp(-8, 7)


SHUFFLED_INT4 = Recipe(ShuffledInt4(), Int8())
SYMMETRIC_INT4 = Recipe(ShuffledInt4(is_symmetric=True), Int8())
