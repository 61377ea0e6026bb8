"""Gumbel-max sampling in plain PyTorch. Noise is computed only for tokens that could win."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.ops.sample.philox import NOISE_MAX, gumbel_noise

_FLAT_MAX = 1 << 14
"""Up to so many candidates are one call over (row, token) pairs. More take a call per row, whose key is a scalar and
not an array: 5 ms instead of 12 ms for a row of 152 k (Zen 4)."""


def sample(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Exact: a token is skipped only if its score + the largest noise is below the total of the leader."""
    num_rows, vocab_size = scores.shape
    leader_scores, leader_ids = scores.max(dim=-1)
    bar = leader_scores + gumbel_noise(seeds, positions, leader_ids)
    can_win = (scores + NOISE_MAX >= bar[:, None]) & (scores > float("-inf"))
    rows, token_ids = can_win.nonzero(as_tuple=True)
    if len(rows) <= _FLAT_MAX:
        noise = gumbel_noise(seeds[rows], positions[rows], token_ids)
    else:
        by_row = torch.split(token_ids, can_win.sum(dim=-1).tolist())
        noise = torch.cat([gumbel_noise(seeds[row], positions[row], row_ids) for row, row_ids in enumerate(by_row)])
    totals = scores[rows, token_ids] + noise
    best = scores.new_full((num_rows,), float("-inf")).scatter_reduce_(0, rows, totals, "amax")
    is_best = totals == best[rows]
    winners = token_ids.new_full((num_rows,), vocab_size)
    winners.scatter_reduce_(0, rows[is_best], token_ids[is_best], "amin")
    return torch.where(winners < vocab_size, winners, 0)
