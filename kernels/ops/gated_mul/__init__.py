"""The activation of a gated MLP: activation(gate) * up, from [..., gate | up] (Shazeer 2020, arXiv:2002.05202); or with
limits, as gpt-oss has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.gated_mul import cpu, reference
from inferd.kernels.registry import Deferred, Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype


def _refuses_triton(key: Key) -> str | None:
    return gpu.refuses(key.device_type, key.dtype)


SILU_MUL: Op[Key, Callable[[Tensor], Tensor]] = Op(
    "silu_mul",
    [
        Implementation("cpp", cpu.silu_mul, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "silu_mul"), _refuses_triton),
        Implementation("reference", reference.silu_mul, always),
    ],
)
GELU_MUL: Op[Key, Callable[[Tensor], Tensor]] = Op(
    "gelu_mul",
    [
        Implementation("cpp", cpu.gelu_mul, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "gelu_mul"), _refuses_triton),
        Implementation("reference", reference.gelu_mul, always),
    ],
)


LIMITED_MUL: Op[Key, Callable[[Tensor, float, float], Tensor]] = Op(
    "limited_mul",
    [
        Implementation("cpp", cpu.limited_mul, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("triton", Deferred(f"{__name__}.triton", "limited_mul"), _refuses_triton),
        Implementation("reference", reference.limited_mul, always),
    ],
)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2I] -> [..., I], computed in fp32 and rounded once."""
    return SILU_MUL.resolve(_key(gate_up))(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh form of gelu: [..., 2I] -> [..., I], computed in fp32 and rounded once."""
    return GELU_MUL.resolve(_key(gate_up))(gate_up)


def limited_mul(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), with the gate at most `limit`, and the up from -limit to limit:
    [..., 2I] -> [..., I], computed in fp32 and rounded once. NaN stays NaN."""
    return LIMITED_MUL.resolve(_key(gate_up))(gate_up, limit, alpha)


def _key(gate_up: Tensor) -> Key:
    assert gate_up.shape[-1] % 2 == 0, f"gate_up has an odd width: {gate_up.shape[-1]}"
    return Key(gate_up.device.type, gate_up.dtype)
