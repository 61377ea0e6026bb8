"""The activation of a gated MLP: activation(gate) * up, from [..., gate | up] (Shazeer 2020, arXiv:2002.05202); or with
limits, as gpt-oss has it.

The plain PyTorch is composed of exp and tanh. torch's own silu, sigmoid and gelu use another formula for the last few
elements of each thread's share (a scalar tail). A row's bits would then change with the number of rows. exp and tanh
have no such tail (measured: torch 2.13, AVX-512, 1-5 threads).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.gelu import wide_gelu, wide_gelu_erf
from inferd.kernels.registry import Deferred, Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype


def _refuses_triton(key: Key) -> str | None:
    return gpu.refuses(key.device_type, key.dtype)


def reference_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return (gate / torch.neg(gate).exp_().add_(1.0)).mul_(up).to(gate_up.dtype)


def reference_gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return wide_gelu(gate).mul_(up).to(gate_up.dtype)


def reference_gelu_erf_mul(gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return wide_gelu_erf(gate).mul_(up).to(gate_up.dtype)


def reference_limited_mul(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = _halves(gate_up)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate / (gate * -alpha).exp_().add_(1.0)).mul_(up.add_(1.0)).to(gate_up.dtype)


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.to(torch.float32).contiguous(), up.to(torch.float32)


_SILU, _GELU_TANH, _LIMITED, _GELU_ERF = 0, 1, 2, 3


def cpp_silu_mul(gate_up: Tensor) -> Tensor:
    return _run(gate_up, _SILU)


def cpp_gelu_mul(gate_up: Tensor) -> Tensor:
    return _run(gate_up, _GELU_TANH)


def cpp_gelu_erf_mul(gate_up: Tensor) -> Tensor:
    return _run(gate_up, _GELU_ERF)


def cpp_limited_mul(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    return _run(gate_up, _LIMITED, limit, alpha)


def _run(gate_up: Tensor, activation: int, limit: float = 0.0, alpha: float = 0.0) -> Tensor:
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype)
    native.function("inferd_gated_mul")(
        gate_up.data_ptr(),
        out.data_ptr(),
        out.numel() // size,
        size,
        activation,
        limit,
        alpha,
        native.DTYPE_CODES[gate_up.dtype],
        torch.get_num_threads(),
    )
    return out


SILU_MUL: Op[Key, Callable[[Tensor], Tensor]] = Op(
    "silu_mul",
    [
        Implementation("cpp", cpp_silu_mul, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "silu_mul"), _refuses_triton),
        Implementation("reference", reference_silu_mul, always),
    ],
)
GELU_MUL: Op[Key, Callable[[Tensor], Tensor]] = Op(
    "gelu_mul",
    [
        Implementation("cpp", cpp_gelu_mul, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "gelu_mul"), _refuses_triton),
        Implementation("reference", reference_gelu_mul, always),
    ],
)
GELU_ERF_MUL: Op[Key, Callable[[Tensor], Tensor]] = Op(
    "gelu_erf_mul",
    [
        Implementation("cpp", cpp_gelu_erf_mul, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("reference", reference_gelu_erf_mul, always),
    ],
)


LIMITED_MUL: Op[Key, Callable[[Tensor, float, float], Tensor]] = Op(
    "limited_mul",
    [
        Implementation("cpp", cpp_limited_mul, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "limited_mul"), _refuses_triton),
        Implementation("reference", reference_limited_mul, always),
    ],
)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2I] -> [..., I], computed in fp32 and rounded once."""
    return SILU_MUL.resolve(_key(gate_up))(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh form of gelu: [..., 2I] -> [..., I], computed in fp32 and rounded once."""
    return GELU_MUL.resolve(_key(gate_up))(gate_up)


def gelu_erf_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the exact form of gelu: [..., 2I] -> [..., I], computed in fp32 and rounded once."""
    return GELU_ERF_MUL.resolve(_key(gate_up))(gate_up)


def limited_mul(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), with the gate at most `limit`, and the up from -limit to limit:
    [..., 2I] -> [..., I], computed in fp32 and rounded once. NaN stays NaN."""
    return LIMITED_MUL.resolve(_key(gate_up))(gate_up, limit, alpha)


def _key(gate_up: Tensor) -> Key:
    assert gate_up.shape[-1] % 2 == 0, f"gate_up has an odd width: {gate_up.shape[-1]}"
    return Key(gate_up.device.type, gate_up.dtype)
