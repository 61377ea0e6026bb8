"""torch._scaled_mm with a scale for each row of both sides, which runs cuBLASLt or CUTLASS."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inferd.kernels import gpu

_MULTIPLE = 16
"""A row's size must be a multiple of so many bytes, on both sides."""


def refuses(device_type: str, dtype: torch.dtype, out_size: int, in_size: int) -> str | None:
    """Why it cannot run; None if it can."""
    if device_type != "cuda":
        return "runs on GPUs only"
    if dtype != torch.bfloat16:
        return f"gives bfloat16, not {dtype}"
    if out_size % _MULTIPLE or in_size % _MULTIPLE:
        return f"takes sizes that are multiples of {_MULTIPLE}, not {out_size} x {in_size}"
    return gpu.refuses(device_type, dtype, torch.float8_e4m3fn)


def bind(
    q: Tensor, scales: Tensor, bias: Tensor | None, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Callable[[Tensor], Tensor]:
    weight, row_scales = q.contiguous().T, scales[None, :].contiguous()
    bias = None if bias is None else bias.to(torch.bfloat16)

    def apply(x: Tensor) -> Tensor:
        x_q, x_scales = quantize(x)
        # No fast accumulation: Hopper's tensor cores keep about 14 bits of a running sum. Without it the sum is
        # promoted to fp32 every 128 products, with it never (arXiv:2412.19437, section 3.5.2).
        return torch._scaled_mm(
            x_q, weight, x_scales[:, None], row_scales, bias, out_dtype=torch.bfloat16, use_fast_accum=False
        )

    return apply
