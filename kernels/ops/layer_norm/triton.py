"""The Triton implementation: one program a row, which stays in registers from load to store.

The floor is memory: x, the result, and with the add also the residual and the sum, once each. The variance is computed
from the centred row, as the definition says: mean of squares minus square of the mean would cancel.
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
def _layer_norm(
    x, residual, weight, bias, total, out, stride, size, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < size
    value = load_row(x, residual, total, row, stride, size, column, is_inside, HAS_RESIDUAL)
    centred = tl.where(is_inside, value - tl.sum(value, 0) / size, 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 0) / size + eps)
    factor = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (centred * scale * factor + shift).to(out.dtype.element_ty), mask=is_inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return run_norm(_layer_norm, x, None, (weight, bias), eps)[0]


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return run_norm(_layer_norm, x, residual, (weight, bias), eps)


def shipped() -> Iterator[Shipped]:
    for size in (64, 1024, 4096, 16384):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for has_residual in (False, True):
                block, num_warps = row_block(size)
                one = Shipped(
                    op="add_layer_norm" if has_residual else "layer_norm",
                    config=f"{DTYPES[dtype]} size {size}",
                    kernel=_layer_norm,
                    signature={
                        **dict.fromkeys(("x", "residual", "weight", "bias", "total", "out"), f"*{DTYPES[dtype]}"),
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
