"""The Triton implementation: each program reads and writes a piece of a row once.

The floor is memory: 3 elements are moved for each result. gelu is computed by a sigmoid, as in `cpu.cpp`: x / (1 +
exp(-2 t)) equals x/2 * (1 + tanh t). This needs no tanh, and is precise even when tanh is near -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import DTYPES, Shipped

_BLOCK, _NUM_WARPS = 1024, 4  # 8 elements a thread: 16 bytes of gates in one load, as many of the rest


@triton.jit
def activated(x, IS_SILU: tl.constexpr):
    """silu or gelu (tanh form) of fp32, in fp32."""
    if IS_SILU:
        return x / (1.0 + tl.exp(-x))
    return x / (1.0 + tl.exp((x + x * x * x * 0.044715) * -1.5957691))  # 2 sqrt(2 / pi)


@triton.jit
def _gated_mul(gate_up, out, size, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < size
    place = gate_up + row * (2 * size) + column
    gate = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(place + size, mask=is_inside, other=0.0).to(tl.float32)
    result = activated(gate, IS_SILU) * up
    tl.store(out + row * size + column, result.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _limited_mul(gate_up, out, size, limit, alpha, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < size
    place = gate_up + row * (2 * size) + column
    gate = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(place + size, mask=is_inside, other=0.0).to(tl.float32)
    # A comparison with NaN is false, so NaN stays.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    result = gate / (1.0 + tl.exp(gate * -alpha)) * (up + 1.0)
    tl.store(out + row * size + column, result.to(out.dtype.element_ty), mask=is_inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    return _run(gate_up, _gated_mul, IS_SILU=True)


def gelu_mul(gate_up: Tensor) -> Tensor:
    return _run(gate_up, _gated_mul, IS_SILU=False)


def limited_mul(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    return _run(gate_up, _limited_mul, limit=limit, alpha=alpha)


def _run(gate_up: Tensor, kernel: Any, **options: Any) -> Tensor:
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (out.numel() // size, triton.cdiv(size, _BLOCK))
    kernel[grid](gate_up, out, size, **options, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return out


def shipped() -> Iterator[Shipped]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for is_silu in (True, False):
            yield Shipped(
                op="silu_mul" if is_silu else "gelu_mul",
                config=DTYPES[dtype],
                kernel=_gated_mul,
                signature={"gate_up": f"*{DTYPES[dtype]}", "out": f"*{DTYPES[dtype]}", "size": "i32"},
                constants={"IS_SILU": is_silu, "BLOCK": _BLOCK},
                num_warps=_NUM_WARPS,
                is_streaming=True,
                multiples=("size",),
            )
        yield Shipped(
            op="limited_mul",
            config=DTYPES[dtype],
            kernel=_limited_mul,
            signature={
                **dict.fromkeys(("gate_up", "out"), f"*{DTYPES[dtype]}"),
                "size": "i32",
                **dict.fromkeys(("limit", "alpha"), "fp32"),
            },
            constants={"BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            is_streaming=True,
            multiples=("size",),
        )
