"""The Triton implementation: one program a row, which stays in registers between the sum and the product.

The floor is memory: x and the result, and with the add also the residual and the sum, once each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.gpu import DTYPES, Shipped
from inferd.kernels.gpu.rows import load_row, row_block, run_norm


@triton.jit
def _rms_norm(
    x, residual, weight, total, out, stride, size, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < size
    value = load_row(x, residual, total, row, stride, size, column, is_inside, HAS_RESIDUAL)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / size + eps)
    factor = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (value * scale * factor).to(out.dtype.element_ty), mask=is_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return run_norm(_rms_norm, x, None, (weight,), eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return run_norm(_rms_norm, x, residual, (weight,), eps)


def shipped() -> Iterator[Shipped]:
    for size in (64, 128, 1024, 2048, 4096, 8192, 16384):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for weight_dtype in dict.fromkeys((dtype, torch.float32)):
                for has_residual in (False, True):
                    block, num_warps = row_block(size)
                    one = Shipped(
                        op="add_rms_norm" if has_residual else "rms_norm",
                        config=f"{DTYPES[dtype]} weight {DTYPES[weight_dtype]} size {size}",
                        kernel=_rms_norm,
                        signature={
                            **dict.fromkeys(("x", "residual", "total", "out"), f"*{DTYPES[dtype]}"),
                            "weight": f"*{DTYPES[weight_dtype]}",
                            "stride": "i32",
                            "size": "i32",
                            "eps": "fp32",
                        },
                        constants={"HAS_RESIDUAL": has_residual, "BLOCK": block, "IS_DEPENDENT": False},
                        num_warps=num_warps,
                        is_streaming=size >= 1024,
                        multiples=("stride", "size"),
                    )
                    yield from (one, one.early())
