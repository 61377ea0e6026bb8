"""Gumbel-max sampling in plain PyTorch: noise is made only for tokens that it could let win."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.sample.philox import NOISE_MAX, gumbel_noise

_CHUNK = 1 << 16
"""Candidates whose noise is made at once: ten rounds over 512 KiB arrays stay in a core's cache."""


def sample(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Exact: a token is left out only where score + the largest noise is below what the leader reaches with its own."""
    num_rows, vocab_size = scores.shape
    leader_scores, leader_ids = scores.max(dim=-1)
    bar = leader_scores + gumbel_noise(seeds, positions, leader_ids)
    can_win = (scores + NOISE_MAX >= bar[:, None]) & (scores > float("-inf"))
    rows, token_ids = can_win.nonzero(as_tuple=True)
    noise = [
        gumbel_noise(seeds[part_rows], positions[part_rows], part_ids)
        for part_rows, part_ids in zip(torch.split(rows, _CHUNK), torch.split(token_ids, _CHUNK), strict=True)
    ]
    totals = scores[rows, token_ids] + torch.cat(noise)
    best = scores.new_full((num_rows,), float("-inf")).scatter_reduce_(0, rows, totals, "amax")
    is_best = totals == best[rows]
    winners = token_ids.new_full((num_rows,), vocab_size)
    winners.scatter_reduce_(0, rows[is_best], token_ids[is_best], "amin")
    return torch.where(winners < vocab_size, winners, 0)
