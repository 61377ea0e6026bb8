"""Shared parts of the Triton kernels in which one program handles one row of activations.

The row stays in registers between its sum and its result: 16 elements a thread, in loads of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import dependent_options

_LEAST = 64
_ELEMENTS_A_WARP = 512
_MAX_WARPS = 32


@triton.jit
def load_row(x, residual, total, row, stride, size, column, is_inside, HAS_RESIDUAL: tl.constexpr):
    """x's row in fp32; with a residual their sum, rounded as it is stored in `total`. Zeros behind the end."""
    value = tl.load(x + row * stride + column, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * size + column, mask=is_inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * size + column, rounded, mask=is_inside)
        value = rounded.to(tl.float32)
    return value


def as_rows(x: Tensor) -> Tensor:
    """x [..., size] as [rows, size], with the elements of a row side by side."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def row_block(size: int) -> tuple[int, int]:
    """(elements that a program covers, warps of a program)."""
    block = max(_LEAST, triton.next_power_of_2(size))
    return block, min(_MAX_WARPS, max(1, block // _ELEMENTS_A_WARP))


def run_norm(
    kernel: Any, x: Tensor, residual: Tensor | None, parameters: Sequence[Tensor], eps: float
) -> tuple[Tensor, Tensor]:
    """(norm of x or of x + residual, that sum), each [..., size], by `kernel(x, residual, *parameters, total, out,
    stride, size, eps)`. Without a residual the second is meaningless."""
    assert all(parameter.is_contiguous() for parameter in parameters)
    rows = as_rows(x)
    size = rows.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block, num_warps = row_block(size)
    kernel[(rows.shape[0],)](
        rows,
        rows if residual is None else residual.contiguous(),
        *parameters,
        total,
        out,
        rows.stride(0),
        size,
        eps,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        **dependent_options(),
        num_warps=num_warps,
    )
    return out, total
