"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops.states import StateRows


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: tuple[Tensor, Tensor] | None,
    state: Tensor,
    rows: StateRows,
    has_silu: bool,
) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    native.function("inferd_short_conv")(
        x.data_ptr(),
        *((0, 0) if gates is None else (gate.data_ptr() for gate in gates)),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        state.data_ptr(),
        rows.query_start.data_ptr(),
        rows.positions.data_ptr(),
        rows.slots.data_ptr(),
        rows.kept_address,
        out.data_ptr(),
        rows.slots.shape[0],
        x.shape[0],
        x.shape[1],
        x.stride(0),
        weight.shape[0],
        int(has_silu),
        native.DTYPE_CODES[x.dtype],
        torch.get_num_threads(),
    )
    return out
