"""The greedy token in plain PyTorch, whose maximum is NaN where a row holds one."""

from __future__ import annotations

from torch import Tensor


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    peaks, ids = logits.max(dim=-1)
    return ids, ~peaks.isfinite()
