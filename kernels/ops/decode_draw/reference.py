"""Decode drawing in plain PyTorch: compute greedy and sampled tokens for all rows, then pick one for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.ops.argmax import argmax
from inferd.kernels.ops.sample import sample
from inferd.kernels.ops.top_k_top_p import Cuts, top_k_top_p

_ANY = torch.finfo(torch.float32).tiny


def draw(
    logits: Tensor,
    slots: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
) -> tuple[Tensor, Tensor]:
    sources = slots.clamp(min=0)
    asked = temperatures[sources].masked_fill_(slots < 0, 0.0)
    token_ids, is_none = argmax(logits)
    scores = (logits - logits.amax(dim=-1, keepdim=True)).div_(asked.clamp(min=_ANY)[:, None])
    scores = scores.contiguous()
    top_k_top_p(scores, Cuts(top_k, top_p, log_min_p), slots.masked_fill(asked == 0.0, -1))
    return torch.where(asked > 0.0, sample(scores, seeds[sources], positions), token_ids), is_none
