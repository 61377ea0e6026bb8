"""The recurrence of Mamba-2 in plain PyTorch, from the formula. One token has the same shapes in any step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from inferd.kernels.ops.states import StateRows


class Weights(NamedTuple):
    """The weights of H heads, [H] fp32 each."""

    a_log: Tensor
    dt_bias: Tensor
    d: Tensor


def mamba2(xbc: Tensor, dt: Tensor, weights: Weights, state: Tensor, rows: StateRows) -> Tensor:
    _, num_heads, _, head_dim = state.shape
    out = torch.empty((len(xbc), num_heads * head_dim), dtype=torch.float32, device=xbc.device)
    for tokens, slot, begins, num_kept in rows.spans():
        current = torch.zeros_like(state[slot]) if begins else state[slot]
        for token in range(tokens.start, tokens.stop):
            current, read = _advance(current, xbc[token].to(torch.float32), dt[token].to(torch.float32), weights)
            out[token] = read.flatten()
            if token + 1 == tokens.start + num_kept:
                kept = current
        state[slot] = kept
    return out


def _advance(state: Tensor, xbc: Tensor, dt: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """(state [H, N, P] behind a token, its result [H, P]), from the one before it."""
    num_heads, state_size, head_dim = state.shape
    x = xbc[: num_heads * head_dim].view(num_heads, head_dim)
    b, c = xbc[num_heads * head_dim :].view(2, -1, state_size)
    b, c = (part.repeat_interleave(num_heads // len(part), 0).unsqueeze(-1) for part in (b, c))
    step = functional.softplus(dt + weights.dt_bias).unsqueeze(-1)
    decay = (-weights.a_log.exp().unsqueeze(-1) * step).exp()
    state = state * decay.unsqueeze(-1) + b * (step * x).unsqueeze(1)
    return state, (state * c).sum(1) + weights.d.unsqueeze(-1) * x
