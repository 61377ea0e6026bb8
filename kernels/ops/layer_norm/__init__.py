"""Layer normalisation over the last dimension, alone or fused with the residual add before it.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias        (Ba et al. 2016, arXiv:1607.06450)

Means are taken in fp32, and a row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.layer_norm import cpu, reference
from inferd.kernels.registry import ROWS_SHARE_SUMS, Deferred, Implementation, Op, always

_MAX_TRITON_SIZE = 16384
"""Most elements that a program of 32 warps holds: 16 a thread."""


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    size: int


def _refuses_triton(key: Key) -> str | None:
    if key.size > _MAX_TRITON_SIZE:
        return f"holds rows of at most {_MAX_TRITON_SIZE}, not {key.size}"
    return gpu.refuses(key.device_type, key.dtype)


LAYER_NORM: Op[Key, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = Op(
    "layer_norm",
    [
        Implementation("cpp", cpu.layer_norm, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "layer_norm"), _refuses_triton),
        Implementation("reference", reference.layer_norm, always, varies=ROWS_SHARE_SUMS),
    ],
)
ADD_LAYER_NORM: Op[Key, Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]] = Op(
    "add_layer_norm",
    [
        Implementation("cpp", cpu.add_layer_norm, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "add_layer_norm"), _refuses_triton),
        Implementation("reference", reference.add_layer_norm, always, varies=ROWS_SHARE_SUMS),
    ],
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise each row of x [..., H] by weight and bias [H]; returns x's shape and dtype."""
    return LAYER_NORM.resolve(_key(x, weight, bias))(x, weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised x + residual, x + residual), both [..., H] in x's dtype."""
    assert residual.shape == x.shape and residual.dtype == x.dtype
    return ADD_LAYER_NORM.resolve(_key(x, weight, bias))(x, residual, weight, bias, eps)


def _key(x: Tensor, weight: Tensor, bias: Tensor) -> Key:
    assert weight.shape == bias.shape == x.shape[-1:], f"weight {tuple(weight.shape)} for rows of {x.shape[-1]}"
    return Key(x.device.type, x.dtype, x.shape[-1])
