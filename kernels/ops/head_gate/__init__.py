"""Heads multiplied by a gate: attention's output by a sigmoid, or by silu behind their norm, as behind a gated delta
rule, or before it, as in Mamba-2. Also a sum with a token's gate, as behind a shared expert.

    sigmoid_gate: x * sigmoid(gate)
    norm_silu_gate: x / sqrt(mean(x^2) + eps) * weight * silu(gate)
    silu_gate_norm: y / sqrt(mean(y^2) + eps) * weight, with y = x * silu(gate)
    add_gated: x + y * sigmoid(gate)

Arithmetic is in fp32, with one rounding. A head's result depends on that head alone, and a token's on that token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.registry import ROWS_SHARE_SUMS, Deferred, Implementation, Op, always

_MAX_TRITON_SIZE = 32768
"""Most elements that a program of 32 warps holds: 32 a thread."""


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    size: int
    """Elements of a head."""


def _refuses_cpp(key: Key) -> str | None:
    return native.refuses(key.device_type, key.dtype)


def _refuses_triton(key: Key) -> str | None:
    if key.size > _MAX_TRITON_SIZE:
        return f"holds heads of at most {_MAX_TRITON_SIZE}, not {key.size}"
    return gpu.refuses(key.device_type, key.dtype)


def reference_sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return (x.to(torch.float32) / _opened(gate.to(torch.float32))).to(x.dtype)


def reference_norm_silu_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    opened = gate.to(torch.float32)
    return (normed * (opened / _opened(opened))).to(x.dtype)


def reference_silu_gate_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    opened = gate.to(torch.float32)
    gated = x * (opened / _opened(opened))
    return (gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps) * weight).to(gate.dtype)


def reference_add_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    opened = y.to(torch.float32) / _opened(gate)
    return (x.to(torch.float32) + opened).to(x.dtype)


def _opened(gate: Tensor) -> Tensor:
    """1 / sigmoid(gate), composed of exp, whose bits do not depend on the number of elements (`gated_mul`)."""
    return torch.neg(gate).exp_().add_(1.0)


def cpp_sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return _run("inferd_head_gate", x, gate, None, 0.0)


def cpp_norm_silu_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _run("inferd_head_gate", x, gate, weight, eps)


def cpp_silu_gate_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _run("inferd_silu_gate_norm", x, gate, weight, eps)


def cpp_add_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    native.function("inferd_add_gated")(
        x.data_ptr(),
        y.data_ptr(),
        gate.data_ptr(),
        out.data_ptr(),
        *x.shape,
        native.DTYPE_CODES[x.dtype],
        torch.get_num_threads(),
    )
    return out


def _run(name: str, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=gate.dtype)
    native.function(name)(
        x.data_ptr(),
        gate.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        out.data_ptr(),
        *x.shape,
        gate.stride(0),
        gate.stride(1),
        eps,
        native.DTYPE_CODES[gate.dtype],
        torch.get_num_threads(),
    )
    return out


SIGMOID_GATE: Op[Key, Callable[[Tensor, Tensor], Tensor]] = Op(
    "sigmoid_gate",
    [
        Implementation("cpp", cpp_sigmoid_gate, _refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton", "sigmoid_gate"), _refuses_triton),
        Implementation("reference", reference_sigmoid_gate, always),
    ],
)
NORM_SILU_GATE: Op[Key, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = Op(
    "norm_silu_gate",
    [
        Implementation("cpp", cpp_norm_silu_gate, _refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton", "norm_silu_gate"), _refuses_triton),
        Implementation("reference", reference_norm_silu_gate, always, varies=ROWS_SHARE_SUMS),
    ],
)
SILU_GATE_NORM: Op[Key, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = Op(
    "silu_gate_norm",
    [
        Implementation("cpp", cpp_silu_gate_norm, _refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton", "silu_gate_norm"), _refuses_triton),
        Implementation("reference", reference_silu_gate_norm, always, varies=ROWS_SHARE_SUMS),
    ],
)
ADD_GATED: Op[Key, Callable[[Tensor, Tensor, Tensor], Tensor]] = Op(
    "add_gated",
    [Implementation("cpp", cpp_add_gated, _refuses_cpp), Implementation("reference", reference_add_gated, always)],
)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x, gate [T, H, D] in one dtype -> [T, H, D]. The elements of a head lie side by side."""
    _check(x, gate)
    assert x.dtype == gate.dtype
    return SIGMOID_GATE.resolve(_key(gate))(x, gate)


def norm_silu_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x, gate [T, H, D] in one dtype and weight [D] fp32 -> [T, H, D]. The elements of a head lie side by side."""
    _check(x, gate)
    assert x.dtype == gate.dtype and weight.shape == x.shape[-1:] and weight.dtype == torch.float32
    assert weight.is_contiguous()
    return NORM_SILU_GATE.resolve(_key(gate))(x, gate, weight, eps)


def silu_gate_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H, D] fp32, gate [T, H, D] and weight [H, D] fp32 -> [T, H, D] in the gate's dtype. The elements of a head
    lie side by side."""
    _check(x, gate)
    assert (
        x.dtype == torch.float32
        and weight.shape == x.shape[1:]
        and weight.dtype == torch.float32
        and weight.is_contiguous()
    )
    return SILU_GATE_NORM.resolve(_key(gate))(x, gate, weight, eps)


def add_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """x, y [T, size] in one dtype and gate [T, 1] fp32 -> [T, size]."""
    assert x.dim() == 2 and x.shape == y.shape and x.dtype == y.dtype
    assert x.is_contiguous() and y.is_contiguous()
    assert gate.shape == (len(x), 1) and gate.is_contiguous() and gate.dtype == torch.float32
    return ADD_GATED.resolve(_key(x))(x, y, gate)


def _key(x: Tensor) -> Key:
    return Key(x.device.type, x.dtype, x.shape[-1])


def _check(x: Tensor, gate: Tensor) -> None:
    assert x.dim() == 3 and x.shape == gate.shape
    assert x.is_contiguous() and gate.stride(2) == 1
