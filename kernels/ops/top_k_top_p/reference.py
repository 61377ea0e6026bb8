"""The cuts in plain PyTorch, over a sorted prefix of each row that grows until it holds every nucleus.

Checking that would wait for the device, so on an accelerator the prefix is the whole row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.ops.top_k_top_p.weights import mass_target, weights

_NEVER = float("-inf")
_FIRST_PREFIX = 64
_PREFIX_GROWTH = 16
_PIECE = 1 << 15
"""Tokens weighed at once: 0.7 ms, against 2.1 ms for a row of 152 k at once, which makes 20 passes over it (Zen 4)."""


def top_k_top_p(scores: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, slots: Tensor | None) -> None:
    if slots is not None:
        held = slots.clamp_min(0)
        top_k = top_k[held].masked_fill_(slots < 0, 0)
        top_p = top_p[held].masked_fill_(slots < 0, 1.0)
        log_min_p = log_min_p[held].masked_fill_(slots < 0, _NEVER)
    vocab_size = scores.shape[1]
    on_host = scores.device.type == "cpu"
    has_top_k, has_top_p = (top_k > 0) & (top_k < vocab_size), top_p < 1.0
    if not on_host or bool(has_top_k.any()):
        rows = has_top_k.nonzero()[:, 0] if on_host else torch.arange(len(scores), device=scores.device)
        width = int(top_k[rows].max()) if on_host else vocab_size
        largest = scores[rows].topk(width, dim=-1).values
        place = torch.where(has_top_k, top_k, vocab_size)[rows] - 1
        _keep_at_least(scores, rows, largest.gather(1, place[:, None])[:, 0])
    if not on_host or bool(has_top_p.any()):
        rows = has_top_p.nonzero()[:, 0] if on_host else torch.arange(len(scores), device=scores.device)
        floors = _nucleus_floors(scores[rows], top_p[rows])
        _keep_at_least(scores, rows, floors.masked_fill_(~has_top_p[rows], _NEVER))
    scores.masked_fill_(scores < log_min_p.to(torch.float32)[:, None], _NEVER)


def _keep_at_least(scores: Tensor, rows: Tensor, floors: Tensor) -> None:
    kept = scores[rows]
    scores[rows] = kept.masked_fill_(kept < floors[:, None], _NEVER)


def _nucleus_floors(scores: Tensor, top_p: Tensor) -> Tensor:
    """[n]: the smallest score in each row's nucleus: the most likely tokens, up to the one that brings their mass to
    `top_p` (Holtzman et al. 2020)."""
    vocab_size = scores.shape[1]
    target = mass_target(top_p, _masses(scores))[:, None]
    width = min(_FIRST_PREFIX, vocab_size) if scores.device.type == "cpu" else vocab_size
    while True:
        largest = scores.topk(width, dim=-1).values
        mass = weights(largest).cumsum(dim=-1)
        if width == vocab_size or bool((mass[:, -1:] >= target).all()):
            break
        width = min(width * _PREFIX_GROWTH, vocab_size)
    inside = (mass < target).sum(dim=-1).clamp_(max=width - 1)
    return largest.gather(1, inside[:, None])[:, 0]


def _masses(scores: Tensor) -> Tensor:
    """[n] int64: the sum of each row's weights."""
    totals = scores.new_zeros(len(scores), dtype=torch.int64)
    for piece in torch.split(scores, max(1, _PIECE // len(scores)), dim=1):
        totals += weights(piece).sum(dim=-1)
    return totals
