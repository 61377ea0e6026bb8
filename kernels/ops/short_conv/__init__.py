"""Causal convolution over the last few tokens, channel by channel, with the earlier inputs kept as a state.

    y[t, c] = act(sum over j < W of weight[j, c] * x[t - W + 1 + j, c] + bias[c])

With gates x is multiplied by the first one, and rounded, before it is an input. y is multiplied by the second one.

Inputs before the row's first come from the state, and are zeros before position 0. A row's result depends on its own
sequence alone, bit for bit, however its tokens were split over steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.states import StateRows
from inferd.kernels.registry import Deferred, Implementation, Op, always

MAX_WIDTH = 4


Gates = tuple[Tensor, Tensor] | None
"""[T, C] each, in x's dtype and strides."""


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    width: int


def _refuses_width(key: Key) -> str | None:
    return None if 2 <= key.width <= MAX_WIDTH else f"takes convolutions of 2 to {MAX_WIDTH} tokens, not {key.width}"


def _refuses_cpp(key: Key) -> str | None:
    return _refuses_width(key) or native.refuses(key.device_type, key.dtype)


def _refuses_triton(key: Key) -> str | None:
    return _refuses_width(key) or gpu.refuses(key.device_type, key.dtype)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: tuple[Tensor, Tensor] | None,
    state: Tensor,
    rows: StateRows,
    has_silu: bool,
) -> Tensor:
    """Products in fp32, added from the oldest input to the newest. Silu is composed of exp, whose bits do
    not depend on the number of elements (`kernels/ops/gated_mul`)."""
    x = x if gates is None else x * gates[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[0]
    for tokens, slot, begins, num_kept in rows.spans():
        history = torch.zeros_like(state[slot]) if begins else state[slot]
        inputs = torch.cat([history, x[tokens]])
        num_tokens = inputs.shape[0] - width + 1
        wide = inputs.to(torch.float32)
        total = wide[:num_tokens] * weight[0]
        for place in range(1, width):
            total = total + wide[place : place + num_tokens] * weight[place]
        total = total if bias is None else total + bias
        total = total / torch.neg(total).exp_().add_(1.0) if has_silu else total
        out[tokens] = (total if gates is None else total * gates[1][tokens].to(torch.float32)).to(x.dtype)
        state[slot] = inputs[num_kept : num_kept + width - 1]
    return out


def cpp(
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


SHORT_CONV: Op[Key, Callable[[Tensor, Tensor, Tensor | None, Gates, Tensor, StateRows, bool], Tensor]] = Op(
    "short_conv",
    [
        Implementation("cpp", cpp, _refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton", "short_conv"), _refuses_triton),
        Implementation("reference", reference, always),
    ],
)


def short_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    rows: StateRows,
    *,
    has_silu: bool,
    bias: Tensor | None = None,
    gates: Gates = None,
) -> Tensor:
    """[T, C] in x's dtype, of sums in fp32 that are rounded once, after silu if `has_silu`.

    x [T, C], its channels side by side; weight [W, C] and bias [C] fp32; state [slots, W - 1, C] in x's dtype, the last
    inputs of each sequence, oldest first, written in place.
    """
    assert x.dim() == 2 and x.stride(1) == 1 and weight.dtype == torch.float32 and weight.is_contiguous()
    assert state.shape[1:] == (weight.shape[0] - 1, x.shape[1]) and state.dtype == x.dtype and state.is_contiguous()
    kinds = {(one.shape, one.dtype, one.stride()) for one in (x, *(gates or ()))}
    assert len(kinds) == 1, "gates lie as x does"
    assert bias is None or (bias.shape == x.shape[1:] and bias.dtype == torch.float32 and bias.is_contiguous())
    return SHORT_CONV.resolve(Key(x.device.type, x.dtype, weight.shape[0]))(
        x, weight, bias, gates, state, rows, has_silu
    )
