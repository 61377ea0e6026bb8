"""The gated delta rule: linear attention whose state forgets, and corrects what it holds for a key (Yang et al. 2024,
arXiv:2412.06464).

For each value head, with the state S [K, V] and a token's q, k [K] and v [V]:

    q = q / |q| / sqrt(K),  k = k / |k|,  beta = sigmoid(b),  decay = exp(-exp(a_log) * softplus(a + dt_bias))
    S = decay * S
    S = S + k (beta * (v - k^T S))^T
    o = q^T S

The state advances token by token, in the same order for prompts, decodes and replays. So a row's bits depend on its
own sequence alone, however its tokens were split over steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from inferd.kernels.cpu import native
from inferd.kernels.ops.states import Key, StateRows, num_groups, refuses_cpp, refuses_triton
from inferd.kernels.registry import Deferred, Implementation, Op, always

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


def reference(qkv: Tensor, gates: Gates, state: Tensor, rows: StateRows) -> Tensor:
    """From the formula. One token has the same shapes in any step."""
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


def cpp(qkv: Tensor, gates: Gates, state: Tensor, rows: StateRows) -> Tensor:
    num_tokens, (_, num_value_heads, key_dim, value_dim) = len(qkv), state.shape
    num_key_heads = num_groups(qkv.shape[1], state)
    out = torch.empty((num_tokens, num_value_heads * value_dim), dtype=qkv.dtype)
    normed = torch.empty((num_tokens, 2 * num_key_heads * key_dim), dtype=torch.float32)
    factors = torch.empty((num_tokens, 2 * num_value_heads), dtype=torch.float32)
    native.function("inferd_gated_delta")(
        qkv.data_ptr(),
        gates.b.data_ptr(),
        gates.a.data_ptr(),
        gates.a_log.data_ptr(),
        gates.dt_bias.data_ptr(),
        state.data_ptr(),
        rows.query_start.data_ptr(),
        rows.positions.data_ptr(),
        rows.slots.data_ptr(),
        rows.kept_address,
        normed.data_ptr(),
        factors.data_ptr(),
        out.data_ptr(),
        rows.slots.shape[0],
        num_tokens,
        num_key_heads,
        num_value_heads,
        key_dim,
        value_dim,
        gates.b.stride(0),
        gates.a.stride(0),
        native.DTYPE_CODES[qkv.dtype],
        torch.get_num_threads(),
    )
    return out


GATED_DELTA: Op[Key, Callable[[Tensor, Gates, Tensor, StateRows], Tensor]] = Op(
    "gated_delta",
    [
        Implementation("cpp", cpp, refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton", "gated_delta"), refuses_triton),
        Implementation("reference", reference, always),
    ],
)


def gated_delta(qkv: Tensor, gates: Gates, state: Tensor, rows: StateRows) -> Tensor:
    """o of all value heads, [T, Hv * V] in qkv's dtype. Arithmetic is in fp32, with one rounding at the end.

    qkv [T, 2 Hk K + Hv V]: q, k and v of all heads, contiguous. Hk divides Hv, and value head h reads key head h // (Hv
    / Hk). state [slots, Hv, K, V] fp32, written in place.
    """
    assert qkv.is_contiguous() and num_groups(qkv.shape[1], state)
    assert gates.a.shape == gates.b.shape == (len(qkv), state.shape[1]) and gates.a.stride(1) == gates.b.stride(1) == 1
    assert gates.a.dtype == gates.b.dtype == qkv.dtype
    assert all(weight.dtype == torch.float32 and weight.is_contiguous() for weight in (gates.a_log, gates.dt_bias))
    return GATED_DELTA.resolve(Key(qkv.device.type, qkv.dtype, *state.shape[2:]))(qkv, gates, state, rows)
