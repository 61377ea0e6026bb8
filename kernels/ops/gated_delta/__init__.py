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

import torch
from torch import Tensor

from inferd.kernels.ops.gated_delta import cpu, reference
from inferd.kernels.ops.gated_delta.reference import Gates
from inferd.kernels.ops.states import Key, StateRows, num_groups, refuses_cpp, refuses_triton
from inferd.kernels.registry import Deferred, Implementation, Op, always

__all__ = ["GATED_DELTA", "Gates", "gated_delta"]


GATED_DELTA: Op[Key, Callable[[Tensor, Gates, Tensor, StateRows], Tensor]] = Op(
    "gated_delta",
    [
        Implementation("cpp", cpu.gated_delta, refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton", "gated_delta"), refuses_triton),
        Implementation("reference", reference.gated_delta, always),
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
