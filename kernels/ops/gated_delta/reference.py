"""The gated delta rule in plain PyTorch, from the formula. One token has the same shapes in any step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from inferd.kernels.ops.states import StateRows

NORM_EPS = 1e-6


class Gates(NamedTuple):
    """The inputs of `decay` and `beta`, for Hv value heads."""

    b: Tensor
    """[T, Hv], its heads side by side."""
    a: Tensor
    """[T, Hv], its heads side by side."""
    a_log: Tensor
    """[Hv] fp32."""
    dt_bias: Tensor
    """[Hv] fp32."""


def gated_delta(qkv: Tensor, gates: Gates, state: Tensor, rows: StateRows) -> Tensor:
    num_value_heads, value_dim = state.shape[1], state.shape[3]
    out = torch.empty((len(qkv), num_value_heads * value_dim), dtype=qkv.dtype, device=qkv.device)
    for tokens, slot, begins, num_kept in rows.spans():
        current = torch.zeros_like(state[slot]) if begins else state[slot]
        for token in range(tokens.start, tokens.stop):
            current, attended = _advance(current, qkv[token].to(torch.float32), gates, token)
            out[token] = attended.flatten().to(qkv.dtype)
            if token + 1 == tokens.start + num_kept:
                kept = current
        state[slot] = kept
    return out


def _advance(state: Tensor, qkv: Tensor, gates: Gates, token: int) -> tuple[Tensor, Tensor]:
    """(state [Hv, K, V] behind a token, its result [Hv, V]), from the one before it."""
    num_value_heads, key_dim, value_dim = state.shape
    q, k = (_normed(part) for part in qkv[: -num_value_heads * value_dim].view(2, -1, key_dim))
    v = qkv[-num_value_heads * value_dim :].view(num_value_heads, value_dim)
    q, k = (part.repeat_interleave(num_value_heads // len(part), 0).unsqueeze(-1) for part in (q * key_dim**-0.5, k))
    beta = gates.b[token].to(torch.float32).sigmoid().unsqueeze(-1)
    speed = functional.softplus(gates.a[token].to(torch.float32) + gates.dt_bias)
    decay = (-gates.a_log.exp() * speed).exp()
    state = state * decay[:, None, None]
    change = (v - (state * k).sum(1)) * beta
    state = state + k * change.unsqueeze(1)
    return state, (state * q).sum(1)


def _normed(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPS)
