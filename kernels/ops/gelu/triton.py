"""The Triton implementation: one program a piece of a row. The floor is memory: each element is read and written once.

The kernel needs no notion of rows, but takes their width and not the number of elements. Loads of 16 bytes need a size
that is a known multiple of 16; the width is one, and the number of elements changes with every step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import DTYPES, Shipped
from inferd.kernels.ops.gated_mul.triton import activated

_BLOCK, _NUM_WARPS = 1024, 4


@triton.jit
def _gelu(x, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < size
    value = tl.load(x + row * size + column, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, activated(value, False).to(out.dtype.element_ty), mask=is_inside)


def gelu(x: Tensor) -> Tensor:
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _gelu[(x.numel() // size, triton.cdiv(size, _BLOCK))](x, out, size, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return out


def shipped() -> Iterator[Shipped]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield Shipped(
            op="gelu",
            config=DTYPES[dtype],
            kernel=_gelu,
            signature={"x": f"*{DTYPES[dtype]}", "out": f"*{DTYPES[dtype]}", "size": "i32"},
            constants={"BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            is_streaming=True,
            multiples=("size",),
        )
