"""Gated heads in plain PyTorch. Gates are composed of exp, whose bits do not depend on the number of elements
(`kernels/ops/gated_mul/reference`)."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return (x.to(torch.float32) / _opened(gate.to(torch.float32))).to(x.dtype)


def norm_silu_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    opened = gate.to(torch.float32)
    return (normed * (opened / _opened(opened))).to(x.dtype)


def silu_gate_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    opened = gate.to(torch.float32)
    gated = x * (opened / _opened(opened))
    return (gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps) * weight).to(gate.dtype)


def add_gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    opened = y.to(torch.float32) / _opened(gate)
    return (x.to(torch.float32) + opened).to(x.dtype)


def _opened(gate: Tensor) -> Tensor:
    """1 / sigmoid(gate)."""
    return torch.neg(gate).exp_().add_(1.0)
