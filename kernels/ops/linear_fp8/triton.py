"""The Triton implementation: products on the tensor cores, with sums promoted to fp32 every 128 inputs.

It serves scales of groups and blocks, which torch._scaled_mm does not accept on every device, and layers whose bits
must depend on the row alone. A program computes one tile of results and walks all inputs in order, in steps of 128. The
number of rows only decides how many of them share a tile. On sm_90 a warp group multiplies 64 rows at a time in any
tile, so an output is always the same chain of instructions. For few rows the floor is memory: a byte for each weight,
read once for each tile of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.device import FP8_MIN_SM
from inferd.kernels.gpu import DTYPES, Shipped
from inferd.kernels.gpu.few_rows import MAX_FP8_ROWS, SCALE_KINDS, few_rows, form, tiles
from inferd.kernels.gpu.tiles import STAGES, operands, shared_need, stages_of, store_tile, tile_of
from inferd.kernels.ops.linear_fp8.activations import Activations, Product

_BLOCK_K = 128
"""Inputs of a step, and inputs that share a scale."""
_BLOCK_N = 64
"""Two tiles make a block of 128 weight rows; a layer of 4,096 outputs has 64 programs."""


@triton.jit(do_not_specialize=["num_rows"])
def _linear_fp8(
    x,
    x_scales,
    weight,
    scales,
    bias,
    out,
    num_rows,
    out_size,
    in_size,
    x_stride,
    HAS_GROUPS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, first_column = tile_of(num_rows, BLOCK_M, BLOCK_N)
    column, inner = first_column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row, is_column = row < num_rows, column < out_size
    x_place, weight_place = operands(x, weight, row, column, inner, x_stride, in_size)
    num_blocks = tl.cdiv(in_size, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(num_blocks):
        left = in_size - block * BLOCK_K
        x_tile = tl.load(x_place + block * BLOCK_K, mask=is_row[:, None] & (inner < left)[None, :], other=0.0)
        mask = is_column[None, :] & (inner < left)[:, None]
        weight_tile = tl.load(weight_place + block * BLOCK_K, mask=mask, other=0.0)
        partial = tl.dot(x_tile, weight_tile)
        if HAS_GROUPS:
            row_scale = tl.load(x_scales + row * num_blocks + block, mask=is_row, other=0.0)
            if HAS_BLOCKS:
                scale = tl.load(scales + (first_column // BLOCK_K) * num_blocks + block)
                total += partial * (row_scale * scale)[:, None]
            else:
                scale = tl.load(scales + column * num_blocks + block, mask=is_column, other=0.0)
                total += partial * row_scale[:, None] * scale[None, :]
        else:
            total += partial
    if not HAS_GROUPS:
        row_scale = tl.load(x_scales + row, mask=is_row, other=0.0)
        scale = tl.load(scales + column, mask=is_column, other=0.0)
        total = total * row_scale[:, None] * scale[None, :]
    store_tile(out, total, bias, row, column, num_rows, out_size, HAS_BIAS)


def bind(q: Tensor, scales: Tensor, bias: Tensor | None, quantize: Activations) -> Product:
    q, scales = q.contiguous(), scales.contiguous()
    out_size, in_size = q.shape
    bias = None if bias is None else bias.contiguous()

    def multiply(x_q: Tensor, x_scales: Tensor, dtype: torch.dtype) -> Tensor:
        assert x_q.stride(1) == 1
        num_rows = x_q.shape[0]
        out = torch.empty((num_rows, out_size), dtype=dtype, device=q.device)
        if not num_rows:
            return out
        block_m, num_warps = _tile(num_rows)
        _linear_fp8[(triton.cdiv(num_rows, block_m) * triton.cdiv(out_size, _BLOCK_N),)](
            x_q,
            x_scales.contiguous(),
            q,
            scales,
            q if bias is None else bias,
            out,
            num_rows,
            out_size,
            in_size,
            x_q.stride(0),
            HAS_GROUPS=scales.dim() == 2,
            HAS_BLOCKS=scales.dim() == 2 and scales.shape[0] != out_size,
            HAS_BIAS=bias is not None,
            BLOCK_M=block_m,
            BLOCK_N=_BLOCK_N,
            BLOCK_K=_BLOCK_K,
            num_warps=num_warps,
            num_stages=stages_of("linear_fp8", block_m, _BLOCK_N, q.dtype.itemsize, gpu.properties_of(q.device)),
        )
        return out

    return Product.on(q.device, quantize, multiply)


class FewOrMany:
    """The layer by the kernel for few rows, which takes activations as they are, or by `many`, which quantizes them."""

    def __init__(self, q: Tensor, scales: Tensor, bias: Tensor | None, many: Product) -> None:
        self.weight, self.scales, self.bias, self._many = q.contiguous(), scales.contiguous(), bias, many
        self.multiply = many.multiply

    def is_few(self, num_rows: int) -> bool:
        """Whether the kernel for few rows multiplies so many rows."""
        return num_rows <= MAX_FP8_ROWS

    def groups_of(self, num_rows: int) -> bool | None:
        return None if self.is_few(num_rows) else self._many.groups_of(num_rows)

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_few(x.shape[0]):
            return few_rows(x, self.weight, self.bias, scales=self.scales)
        return self._many(x)


def _tile(num_rows: int) -> tuple[int, int]:
    """(rows of a tile, warps), with a warp group for each 64 rows, the rows of sm_90's instruction."""
    return (64, 4) if num_rows <= 64 else (128, 8)


_PARTS: tuple[tuple[str, dict[str, bool], str], ...] = (
    ("linear_fp8_few_rows", {}, "bf16"),
    ("norm_linear", {"HAS_NORM": True}, "bf16"),
    ("linear_residual", {"HAS_RESIDUAL": True}, "bf16"),
    ("norm_gate_up silu", {"HAS_NORM": True, "HAS_GATE": True, "IS_SILU": True}, "bf16"),
)
"""(op and activation, flags, dtype) of few rows."""
_MORE_PARTS: tuple[tuple[str, dict[str, bool], str], ...] = (
    ("linear_fp8_few_rows", {}, "fp16"),
    ("linear_residual", {"HAS_RESIDUAL": True}, "fp16"),
    ("gate_up silu", {"HAS_GATE": True, "IS_SILU": True}, "bf16"),
    ("norm_gate_up gelu", {"HAS_NORM": True, "HAS_GATE": True}, "bf16"),
    ("norm_linear norm fp32", {"HAS_NORM": True}, "bf16"),
    ("norm_gate_up gelu norm fp32", {"HAS_NORM": True, "HAS_GATE": True}, "bf16"),
)


def shipped() -> Iterator[Shipped]:
    yield from _any_rows_forms()
    yield from _few_rows_forms()


def _few_rows_forms() -> Iterator[Shipped]:
    """With scales of groups all dtypes and fused operations; with other scales the most common ones."""
    for kind, scales in SCALE_KINDS.items():
        for name, given, dtype in (*_PARTS, *(_MORE_PARTS if kind == "groups" else ())):
            op, *rest = name.split()
            for tile in tiles(has_gate="HAS_GATE" in given, is_fp8=True):
                one = form(
                    op,
                    " ".join([dtype, "weight fp8", kind, *rest]),
                    given,
                    tile,
                    x=dtype,
                    norm="fp32" if name.endswith("norm fp32") else dtype,
                    scales=scales,
                )
                yield from (one, one.early(is_prefetching=True))


def _any_rows_forms() -> Iterator[Shipped]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, has_groups, has_blocks in (("rows", False, False), ("groups", True, False), ("blocks", True, True)):
            for has_bias in (False, True) if dtype == torch.bfloat16 else (False,):
                for num_rows in (64, 128):
                    block_m, num_warps = _tile(num_rows)
                    yield Shipped(
                        op="linear_fp8",
                        config=f"{DTYPES[dtype]} {name}{' bias' if has_bias else ''} tile {block_m}",
                        kernel=_linear_fp8,
                        signature={
                            **dict.fromkeys(("x", "weight"), "*fp8e4nv"),
                            **dict.fromkeys(("x_scales", "scales"), "*fp32"),
                            "bias": f"*{DTYPES[dtype]}" if has_bias else "*fp8e4nv",
                            "out": f"*{DTYPES[dtype]}",
                            **dict.fromkeys(("num_rows", "out_size", "in_size", "x_stride"), "i32"),
                        },
                        constants={
                            "HAS_GROUPS": has_groups,
                            "HAS_BLOCKS": has_blocks,
                            "HAS_BIAS": has_bias,
                            "BLOCK_M": block_m,
                            "BLOCK_N": _BLOCK_N,
                            "BLOCK_K": _BLOCK_K,
                        },
                        num_warps=num_warps,
                        num_stages=STAGES,
                        shared=shared_need(block_m, _BLOCK_N, 1),
                        is_matrix=True,
                        is_streaming=True,
                        multiples=("out_size", "in_size", "x_stride"),
                        min_sm=FP8_MIN_SM,
                    )
