"""The Triton implementation: one program a piece of a row. The floor is memory: each element is read and written once.

Each operation is rounded to the dtype, as in the reference. In fp32 the compiler sees no such rounding, so the kernel
forbids it to fuse the product into the sum.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import DTYPES, Shipped

_BLOCK, _NUM_WARPS = 1024, 4


@triton.jit
def _scaled_add(
    x, residual, out, multiplier, size, IS_SCALED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < size
    value = tl.load(x + row * size + column, mask=is_inside, other=0.0)
    if IS_SCALED:
        value = (value.to(tl.float32) * multiplier).to(out.dtype.element_ty)
    if HAS_RESIDUAL:
        other = tl.load(residual + row * size + column, mask=is_inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * size + column, value, mask=is_inside)


def scaled_add(x: Tensor, multiplier: float, residual: Tensor | None) -> Tensor:
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _scaled_add[(x.numel() // size, triton.cdiv(size, _BLOCK))](
        x,
        x if residual is None else residual.contiguous(),
        out,
        float(multiplier),
        size,
        IS_SCALED=multiplier != 1.0,
        HAS_RESIDUAL=residual is not None,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )
    return out


def shipped() -> Iterator[Shipped]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for is_scaled, has_residual in ((True, False), (False, True), (True, True)):
            yield Shipped(
                op="scaled_add",
                config=f"{DTYPES[dtype]}{' scaled' * is_scaled}{' added' * has_residual}",
                kernel=_scaled_add,
                signature={
                    **dict.fromkeys(("x", "residual", "out"), f"*{DTYPES[dtype]}"),
                    "multiplier": "fp32",
                    "size": "i32",
                },
                constants={"IS_SCALED": is_scaled, "HAS_RESIDUAL": has_residual, "BLOCK": _BLOCK},
                num_warps=_NUM_WARPS,
                is_streaming=True,
                multiples=("size",),
                options={"enable_fp_fusion": False},
            )
