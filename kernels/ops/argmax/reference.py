"""The greedy token in plain PyTorch: the maximum of a row that holds a NaN is NaN."""

from __future__ import annotations

from torch import Tensor


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    peaks, ids = logits.max(dim=-1)
    return ids, ~peaks.isfinite()
