"""Calls the C++ implementation (`cpu.cpp`), for the cases that it supports."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops.gated_delta.reference import Gates
from inferd.kernels.ops.states import StateRows, num_groups


def gated_delta(qkv: Tensor, gates: Gates, state: Tensor, rows: StateRows) -> Tensor:
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
