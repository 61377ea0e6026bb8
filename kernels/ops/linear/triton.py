"""The Triton implementation for any number of rows, with bits that depend on the row alone. `gpu/few_rows` has the
product of few rows; its forms are listed here.

A program computes a tile of results, and walks all inputs in equal steps, in order. Nothing is split, and a tile has
the same width for any number of rows. On sm_90 a warp group multiplies 64 rows at a time in any tile, so an output is
always the same chain of instructions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.gpu import DTYPES, Shipped
from inferd.kernels.gpu.few_rows import form, tiles
from inferd.kernels.gpu.tiles import STAGES, STEP_BYTES, operands, shared_need, stages_of, store_tile, tile_of

_INVARIANT_N = 64


@triton.jit(do_not_specialize=["num_rows"])
def _invariant(
    x,
    weight,
    bias,
    out,
    num_rows,
    out_size,
    in_size,
    x_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, first_column = tile_of(num_rows, BLOCK_M, BLOCK_N)
    column, inner = first_column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row, is_column = row < num_rows, column < out_size
    x_place, weight_place = operands(x, weight, row, column, inner, x_stride, in_size)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_size, BLOCK_K):
        is_inner = inner < in_size - start
        x_tile = tl.load(x_place + start, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        weight_tile = tl.load(weight_place + start, mask=is_column[None, :] & is_inner[:, None], other=0.0)
        total = tl.dot(x_tile, weight_tile, total, input_precision="ieee")
    store_tile(out, total, bias, row, column, num_rows, out_size, HAS_BIAS)


class Invariant:
    """x W^T + b in `out_dtype`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, _: object, out_dtype: torch.dtype) -> None:
        self.weight, self.bias, self._out_dtype = weight.contiguous(), bias, out_dtype
        self.scales: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias, out_dtype = self.weight, self.bias, self._out_dtype
        out_size, in_size = weight.shape
        x = x if x.stride(1) == 1 else x.contiguous()
        num_rows = x.shape[0]
        out = torch.empty((num_rows, out_size), dtype=out_dtype, device=x.device)
        if not num_rows:
            return out
        block_m, num_warps = _invariant_tile(num_rows, x.dtype, out_dtype != x.dtype)
        device = gpu.properties_of(x.device)
        _invariant[(triton.cdiv(num_rows, block_m) * triton.cdiv(out_size, _INVARIANT_N),)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            num_rows,
            out_size,
            in_size,
            x.stride(0),
            HAS_BIAS=bias is not None,
            BLOCK_M=block_m,
            BLOCK_N=_INVARIANT_N,
            BLOCK_K=_invariant_step(x.dtype),
            num_warps=num_warps,
            num_stages=stages_of("linear_invariant", block_m, _INVARIANT_N, x.dtype.itemsize, device),
            **_invariant_limits(x.dtype, block_m),
        )
        return out


def _invariant_tile(num_rows: int, dtype: torch.dtype, is_wide: bool) -> tuple[int, int]:
    """(rows of a tile, warps), with a warp group for each 64 rows. With wide results two groups would spill on
    sm_100, so one computes both halves of a tile."""
    if num_rows <= 64 or dtype == torch.float32:
        return 64, 4
    return 128, 4 if is_wide else 8


def _invariant_limits(dtype: torch.dtype, block_m: int) -> dict[str, int]:
    """Compiler options. Left alone, the assembler takes 96 registers for small tiles on sm_120, and spills."""
    return {"maxnreg": 168} if block_m == 64 and dtype != torch.float32 else {}


def _invariant_step(dtype: torch.dtype) -> int:
    """Inputs of one step."""
    return STEP_BYTES // dtype.itemsize


_PARTS: tuple[tuple[str, dict[str, bool]], ...] = (
    ("linear_few_rows", {}),
    ("linear_few_rows bias", {"HAS_BIAS": True}),
    ("linear_few_rows out fp32", {}),
    ("norm_linear", {"HAS_NORM": True}),
    ("norm_linear bias", {"HAS_NORM": True, "HAS_BIAS": True}),
    ("linear_residual", {"HAS_RESIDUAL": True}),
    ("gate_up silu", {"HAS_GATE": True, "IS_SILU": True}),
    ("norm_gate_up silu", {"HAS_NORM": True, "HAS_GATE": True, "IS_SILU": True}),
    ("norm_gate_up gelu", {"HAS_NORM": True, "HAS_GATE": True}),
    ("norm_linear norm fp32", {"HAS_NORM": True}),
    ("norm_gate_up gelu norm fp32", {"HAS_NORM": True, "HAS_GATE": True}),
)
_IN_HALF = ("linear_few_rows", "linear_few_rows out fp32", "linear_residual")


def shipped() -> Iterator[Shipped]:
    """Forms without a norm include float16, which `fused` refuses with one. A bias or a gate changes no instruction's
    name. Norms of one plus their weight are in fp32. Layers that give fp32 have no bias."""
    in_half = [(name, given, "fp16") for name, given in _PARTS if name in _IN_HALF]
    for name, given, dtype_name in (*((name, given, "bf16") for name, given in _PARTS), *in_half):
        op, *rest = name.split()
        for tile in tiles(has_gate="HAS_GATE" in given, is_fp8=False):
            one = form(
                op,
                " ".join([dtype_name, *rest]),
                given,
                tile,
                x=dtype_name,
                out="fp32" if name.endswith("out fp32") else dtype_name,
                norm="fp32" if name.endswith("norm fp32") else dtype_name,
            )
            yield from (one, one.early(is_prefetching=True))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = DTYPES[dtype]
        for has_bias, out in dict.fromkeys(((False, name), (dtype == torch.bfloat16, name), (False, "fp32"))):
            for block_m, num_warps in dict.fromkeys(_invariant_tile(rows, dtype, out != name) for rows in (64, 128)):
                yield _invariant_form(dtype, block_m, num_warps, out, has_bias)


def _invariant_form(dtype: torch.dtype, block_m: int, num_warps: int, out: str, has_bias: bool) -> Shipped:
    name = DTYPES[dtype]
    return Shipped(
        op="linear_invariant",
        config=f"{name}{' bias' if has_bias else ''}{'' if out == name else ' out fp32'} tile {block_m}",
        kernel=_invariant,
        signature={
            **dict.fromkeys(("x", "weight", "bias"), f"*{name}"),
            "out": f"*{out}",
            **dict.fromkeys(("num_rows", "out_size", "in_size", "x_stride"), "i32"),
        },
        constants={
            "HAS_BIAS": has_bias,
            "BLOCK_M": block_m,
            "BLOCK_N": _INVARIANT_N,
            "BLOCK_K": _invariant_step(dtype),
        },
        num_warps=num_warps,
        num_stages=STAGES,
        shared=shared_need(block_m, _INVARIANT_N, dtype.itemsize),
        options=_invariant_limits(dtype, block_m),
        is_matrix=dtype != torch.float32,  # fp32 is multiplied outside the tensor cores
        is_streaming=True,
        multiples=("out_size", "in_size", "x_stride"),
    )
