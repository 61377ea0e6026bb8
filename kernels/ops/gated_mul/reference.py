"""Gated activations in plain PyTorch, composed of exp and tanh.

torch's own silu, sigmoid and gelu use another formula for the last few elements of each thread's share (a scalar tail).
A row's bits would then change with the number of rows. exp and tanh have no such tail (measured: torch 2.13, AVX-512,
1-5 threads).
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.ops.gelu import wide_gelu


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return (gate / torch.neg(gate).exp_().add_(1.0)).mul_(up).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = _halves(gate_up)
    return wide_gelu(gate).mul_(up).to(gate_up.dtype)


def limited_mul(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = _halves(gate_up)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate / (gate * -alpha).exp_().add_(1.0)).mul_(up.add_(1.0)).to(gate_up.dtype)


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.to(torch.float32).contiguous(), up.to(torch.float32)
