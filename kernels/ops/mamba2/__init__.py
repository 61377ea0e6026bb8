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

import torch
from torch import Tensor

from inferd.kernels.ops.mamba2 import cpu, reference
from inferd.kernels.ops.mamba2.reference import Weights
from inferd.kernels.ops.states import Key, StateRows, num_groups, refuses_cpp, refuses_triton
from inferd.kernels.registry import Deferred, Implementation, Op, always

__all__ = ["MAMBA2", "Weights", "mamba2"]


MAMBA2: Op[Key, Callable[[Tensor, Tensor, Weights, Tensor, StateRows], Tensor]] = Op(
    "mamba2",
    [
        Implementation("cpp", cpu.mamba2, refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton", "mamba2"), refuses_triton),
        Implementation("reference", reference.mamba2, always),
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
