"""The Triton implementation: a program for each 2048 tokens of a mask.

The floor is memory: a token's logit is read and written, with an eighth of a byte of mask.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import Shipped

_BLOCK, _NUM_WARPS = 2048, 4


@triton.jit
def _mask_tokens(logits, masks, row_of, size, words, BLOCK: tl.constexpr):
    number, token_ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_of + number)
    if row >= 0:
        is_inside = token_ids < size
        word = tl.load(masks + number * words + token_ids // 32, mask=token_ids // 32 < words, other=0)
        values = tl.load(logits + row * size + token_ids, mask=is_inside, other=0.0)
        is_allowed = ((word >> (token_ids % 32)) & 1) != 0
        tl.store(logits + row * size + token_ids, tl.where(is_allowed, values, float("-inf")), mask=is_inside)


def mask_tokens(logits: Tensor, masks: Tensor, row_of: Tensor) -> None:
    (num_masks, words), size = masks.shape, logits.shape[1]
    _mask_tokens[(num_masks, triton.cdiv(size, _BLOCK))](
        logits, masks, row_of, size, words, BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )


def shipped() -> Iterator[Shipped]:
    yield Shipped(
        op="mask_tokens",
        config="fp32",
        kernel=_mask_tokens,
        signature={"logits": "*fp32", "masks": "*i32", "row_of": "*i64", "size": "i32", "words": "i32"},
        constants={"BLOCK": _BLOCK},
        num_warps=_NUM_WARPS,
        is_streaming=True,
        multiples=("size",),
    )
