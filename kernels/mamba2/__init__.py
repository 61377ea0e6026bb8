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

from inferd.kernels import native
from inferd.kernels.mamba2 import cpu, reference
from inferd.kernels.mamba2.reference import Weights
from inferd.kernels.registry import Implementation, Op, always
from inferd.kernels.states import StateRows

__all__ = ["MAMBA2", "Weights", "mamba2"]


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    state_size: int
    head_dim: int


def _refuses_cpp(key: Key) -> str | None:
    if key.state_size % 2 or key.state_size > cpu.MAX_STATE_SIZE:
        return f"takes even states of at most {cpu.MAX_STATE_SIZE}, not {key.state_size}"
    if key.head_dim % cpu.HEAD_MULTIPLE:
        return f"takes heads that are multiples of {cpu.HEAD_MULTIPLE}, not {key.head_dim}"
    return native.refuses(key.device_type, key.dtype)


MAMBA2: Op[Key, Callable[[Tensor, Tensor, Weights, Tensor, StateRows], Tensor]] = Op(
    "mamba2",
    [
        Implementation("cpp", cpu.mamba2, _refuses_cpp),
        Implementation("reference", reference.mamba2, always),
    ],
)


def mamba2(xbc: Tensor, dt: Tensor, weights: Weights, state: Tensor, rows: StateRows) -> Tensor:
    """y of all heads, [T, H P] fp32, because a norm comes next.

    xbc [T, H P + 2 G N]: x of all heads, then B and C of all groups, contiguous. G divides H, and head h reads group h
    // (H / G). dt [T, H], its heads side by side. state [slots, H, N, P] fp32, written in place.
    """
    num_slots, num_heads, state_size, head_dim = state.shape
    num_groups, rest = divmod(xbc.shape[1] - num_heads * head_dim, 2 * state_size)
    assert not rest and num_groups and num_heads % num_groups == 0
    assert state.dtype == torch.float32 and num_slots and dt.shape == (len(xbc), num_heads)
    return MAMBA2.resolve(Key(xbc.device.type, xbc.dtype, state_size, head_dim))(xbc, dt, weights, state, rows)
