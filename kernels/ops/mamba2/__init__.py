"""The recurrence of Mamba-2 layers: a state that forgets, and to which each token adds (Dao and Gu 2024,
arXiv:2405.21060).

For each head, with the state S [N, P] and a token's x [P], B and C [N]:

    step = softplus(dt + dt_bias),  decay = exp(-exp(a_log) * step)
    S = decay * S + B (step * x)^T
    y = C^T S + d * x

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


class Weights(NamedTuple):
    """The weights of H heads, [H] fp32 each."""

    a_log: Tensor
    dt_bias: Tensor
    d: Tensor


def reference(xbc: Tensor, dt: Tensor, weights: Weights, state: Tensor, rows: StateRows) -> Tensor:
    """From the formula. One token has the same shapes in any step."""
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


def cpp(xbc: Tensor, dt: Tensor, weights: Weights, state: Tensor, rows: StateRows) -> Tensor:
    num_tokens, (_, num_heads, state_size, head_dim) = len(xbc), state.shape
    bc_size = xbc.shape[1] - num_heads * head_dim
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=torch.float32)
    wide = torch.empty((num_tokens, bc_size), dtype=torch.float32)
    factors = torch.empty((num_tokens, 2 * num_heads), dtype=torch.float32)
    native.function("inferd_mamba2")(
        xbc.data_ptr(),
        dt.data_ptr(),
        *(weight.data_ptr() for weight in weights),
        state.data_ptr(),
        rows.query_start.data_ptr(),
        rows.positions.data_ptr(),
        rows.slots.data_ptr(),
        rows.kept_address,
        wide.data_ptr(),
        factors.data_ptr(),
        out.data_ptr(),
        rows.slots.shape[0],
        num_tokens,
        num_groups(xbc.shape[1], state),
        num_heads,
        state_size,
        head_dim,
        dt.stride(0),
        native.DTYPE_CODES[xbc.dtype],
        torch.get_num_threads(),
    )
    return out


MAMBA2: Op[Key, Callable[[Tensor, Tensor, Weights, Tensor, StateRows], Tensor]] = Op(
    "mamba2",
    [
        Implementation("cpp", cpp, refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton", "mamba2"), refuses_triton),
        Implementation("reference", reference, always),
    ],
)


def mamba2(xbc: Tensor, dt: Tensor, weights: Weights, state: Tensor, rows: StateRows) -> Tensor:
    """y of all heads, [T, H P] fp32, because a norm comes next.

    xbc [T, H P + 2 G N]: x of all heads, then B and C of all groups, contiguous. G divides H, and head h reads group h
    // (H / G). dt [T, H], its heads side by side. state [slots, H, N, P] fp32, written in place.
    """
    assert xbc.is_contiguous() and num_groups(xbc.shape[1], state)
    assert dt.shape == (len(xbc), state.shape[1]) and dt.stride(1) == 1 and dt.dtype == xbc.dtype
    assert all(weight.dtype == torch.float32 and weight.is_contiguous() for weight in weights)
    return MAMBA2.resolve(Key(xbc.device.type, xbc.dtype, *state.shape[2:]))(xbc, dt, weights, state, rows)
