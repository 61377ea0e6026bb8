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

from inferd.kernels import native
from inferd.kernels.gated_delta import cpu, reference
from inferd.kernels.gated_delta.gates import Gates
from inferd.kernels.registry import Implementation, Op, always
from inferd.kernels.states import StateRows

__all__ = ["GATED_DELTA", "Gates", "gated_delta"]


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    key_dim: int
    value_dim: int


def _refuses_cpp(key: Key) -> str | None:
    if key.key_dim % 2 or key.key_dim > cpu.MAX_KEY_DIM:
        return f"takes even key heads of at most {cpu.MAX_KEY_DIM}, not {key.key_dim}"
    if key.value_dim % cpu.VALUE_MULTIPLE:
        return f"takes value heads that are multiples of {cpu.VALUE_MULTIPLE}, not {key.value_dim}"
    return native.refuses(key.device_type, key.dtype)


GATED_DELTA: Op[Key, Callable[[Tensor, Gates, Tensor, StateRows], Tensor]] = Op(
    "gated_delta",
    [
        Implementation("cpp", cpu.gated_delta, _refuses_cpp),
        Implementation("reference", reference.gated_delta, always),
    ],
)


def gated_delta(qkv: Tensor, gates: Gates, state: Tensor, rows: StateRows) -> Tensor:
    """o of all value heads, [T, Hv * V] in qkv's dtype. Arithmetic is in fp32, with one rounding at the end.

    qkv [T, 2 Hk K + Hv V]: q, k and v of all heads, contiguous. Hk divides Hv, and value head h reads key head h // (Hv
    / Hk). state [slots, Hv, K, V] fp32, written in place.
    """
    num_slots, num_value_heads, key_dim, value_dim = state.shape
    num_key_heads, rest = divmod(qkv.shape[1] - num_value_heads * value_dim, 2 * key_dim)
    assert not rest and num_key_heads and num_value_heads % num_key_heads == 0
    assert state.dtype == torch.float32 and num_slots and gates.a.shape == gates.b.shape == (len(qkv), num_value_heads)
    return GATED_DELTA.resolve(Key(qkv.device.type, qkv.dtype, key_dim, value_dim))(qkv, gates, state, rows)
