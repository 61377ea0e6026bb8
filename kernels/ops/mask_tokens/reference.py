"""Packed masks in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_tokens(logits: Tensor, masks: Tensor, row_of: Tensor) -> None:
    num_rows, vocab_size = logits.shape
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    is_out = ((masks[:, :, None] >> bits) & 1).eq(0).flatten(1)[:, :vocab_size]
    # Masks without a row go to one additional row.
    forbidden = torch.zeros(num_rows + 1, vocab_size, dtype=torch.bool, device=logits.device)
    covered = torch.nn.functional.pad(is_out, (0, vocab_size - is_out.shape[1]), value=True)
    forbidden[torch.where(row_of < 0, num_rows, row_of)] = covered
    logits.masked_fill_(forbidden[:num_rows], float("-inf"))
