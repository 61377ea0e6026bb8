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
from inferd.kernels.ops.short_conv import cpu, reference
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


SHORT_CONV: Op[Key, Callable[[Tensor, Tensor, Tensor | None, Gates, Tensor, StateRows, bool], Tensor]] = Op(
    "short_conv",
    [
        Implementation("cpp", cpu.short_conv, _refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton", "short_conv"), _refuses_triton),
        Implementation("reference", reference.short_conv, always),
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
