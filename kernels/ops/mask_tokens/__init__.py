"""Set the logits of tokens that a grammar forbids, from packed masks, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.registry import Deferred, Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    vocab_size: int


def cpp(logits: Tensor, masks: Tensor, row_of: Tensor) -> None:
    native.function("inferd_mask_tokens")(
        logits.data_ptr(),
        masks.data_ptr(),
        row_of.data_ptr(),
        logits.shape[1],
        masks.shape[0],
        masks.shape[1],
        torch.get_num_threads(),
    )


def reference(logits: Tensor, masks: Tensor, row_of: Tensor) -> None:
    num_rows, vocab_size = logits.shape
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    is_out = ((masks[:, :, None] >> bits) & 1).eq(0).flatten(1)[:, :vocab_size]
    # Masks without a row go to one additional row.
    forbidden = torch.zeros(num_rows + 1, vocab_size, dtype=torch.bool, device=logits.device)
    covered = torch.nn.functional.pad(is_out, (0, vocab_size - is_out.shape[1]), value=True)
    forbidden[torch.where(row_of < 0, num_rows, row_of)] = covered
    logits.masked_fill_(forbidden[:num_rows], float("-inf"))


MASK_TOKENS: Op[Key, Callable[[Tensor, Tensor, Tensor], None]] = Op(
    "mask_tokens",
    [
        Implementation("cpp", cpp, lambda key: native.refuses(key.device_type, torch.float32)),
        Implementation(
            "triton", Deferred(f"{__name__}.triton", "mask_tokens"), lambda key: gpu.refuses(key.device_type)
        ),
        Implementation("reference", reference, always),
    ],
)


def mask_tokens(logits: Tensor, masks: Tensor, row_of: Tensor) -> None:
    """Set every logit that a mask does not allow to -inf, in place.

    logits [R, V] fp32, rows contiguous. masks [M, W] int32: bit i of word w allows token 32 w + i, the layout of
    llguidance and xgrammar. A token at 32 W or above is forbidden; a bit at V or above is ignored. `row_of` [M] int64
    is the row of each mask, no two alike; a mask whose row is negative is ignored.
    """
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    assert masks.dtype == torch.int32 and masks.is_contiguous() and row_of.is_contiguous()
    assert row_of.dtype == torch.int64 and row_of.shape == masks.shape[:1]
    MASK_TOKENS.resolve(Key(logits.device.type, logits.shape[1]))(logits, masks, row_of)
