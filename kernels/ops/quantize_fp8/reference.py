"""Rows as 8-bit floats in plain PyTorch, composed of the plain PyTorch ops."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.ops.gated_mul import reference_gelu_mul, reference_silu_mul
from inferd.kernels.ops.rms_norm import reference_add_rms_norm, reference_rms_norm

E4M3_MAX = 448.0
GROUP = 128
"""Elements of a row that share a scale, if not all do. The last group may be shorter."""
Quantized = tuple[Tensor, Tensor]


def quantize_fp8(x: Tensor, has_groups: bool = False) -> Quantized:
    if has_groups:
        size = x.shape[-1]
        padded = torch.nn.functional.pad(x, (0, -size % GROUP))
        q, scales = quantize_fp8(padded.reshape(*x.shape[:-1], padded.shape[-1] // GROUP, GROUP))
        return q.flatten(-2)[..., :size], scales
    wide = x.to(torch.float32)
    scales = wide.abs().amax(-1) / E4M3_MAX
    scales = scales.masked_fill(scales == 0.0, 1.0)
    return cast(wide / scales.unsqueeze(-1), torch.float8_e4m3fn), scales


def cast(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 as `dtype`. Values too large for 8 bits become +-448; some versions of torch would give NaN."""
    if dtype == torch.float8_e4m3fn:
        wide = wide.clamp(-E4M3_MAX, E4M3_MAX)
    return wide.to(dtype)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, has_groups: bool) -> Quantized:
    return quantize_fp8(reference_rms_norm(x, weight, eps), has_groups)


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, has_groups: bool
) -> tuple[Quantized, Tensor]:
    normed, total = reference_add_rms_norm(x, residual, weight, eps)
    return quantize_fp8(normed, has_groups), total


def silu_mul_fp8(gate_up: Tensor, has_groups: bool) -> Quantized:
    return quantize_fp8(reference_silu_mul(gate_up), has_groups)


def gelu_mul_fp8(gate_up: Tensor, has_groups: bool) -> Quantized:
    return quantize_fp8(reference_gelu_mul(gate_up), has_groups)
