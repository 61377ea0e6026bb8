"""The Triton product of pairs and their experts' matrices of 8-bit or 4-bit integers.

A program computes a tile of results of one expert, as in `triton.py`, and walks its inputs as `kernels/gpu/integers`
does. A tile has 64 columns, so a row's bits are those of `bind_invariant` of its expert's layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.gpu import Shipped
from inferd.kernels.gpu.integers import (
    COLUMNS_A_WARP,
    ROWS,
    STAGES,
    Layer,
    places,
    registers,
    shared_need,
    stages_of,
    walked,
)
from inferd.kernels.gpu.packed_integers import STEP, Packed, constants, name_of, types_of
from inferd.kernels.gpu.tiles import LEAST_SCANNED, expert_tile
from inferd.kernels.ops.experts.reference import Routing
from inferd.kernels.ops.quantized import TABLES

_BLOCK_N = 64


@triton.jit(do_not_specialize=["most_tiles", "num_spans", "num_groups"])
def _product(
    x, weight, scales, offsets, bias, rows, starts, out, most_tiles, num_experts, num_spans, num_groups, out_size,
    in_size,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, OFFSETS: tl.constexpr, TABLE: tl.constexpr, SPAN: tl.constexpr,
    HAS_TAIL: tl.constexpr, HAS_BIAS: tl.constexpr, BY_ROW: tl.constexpr, SCANNED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """`offsets` are those of the matrices. Rows and columns behind the last are computed from the last, and not
    stored."""
    tile, first_column = tl.program_id(0) % most_tiles, tl.program_id(0) // most_tiles * BLOCK_N
    expert, first, end = expert_tile(starts, num_experts, tile, BLOCK_M, SCANNED)
    if end == 0:
        return
    pair, column = first + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    read_pair, read_column = tl.minimum(pair, end - 1), tl.minimum(column, out_size - 1)
    row = tl.load(rows + read_pair) if BY_ROW else read_pair
    byte, inner = places(SPAN, BITS)
    span_bytes = out_size.to(tl.int64) * (SPAN * BITS // 8)
    own_weight = weight + expert.to(tl.int64) * num_spans * span_bytes
    own_groups = expert.to(tl.int64) * num_groups * out_size + read_column
    total = walked(
        x + row.to(tl.int64)[None, :] * in_size + inner[:, None],
        own_weight + read_column.to(tl.int64)[:, None] * (SPAN * BITS // 8) + byte[None, :],
        scales + own_groups, offsets + own_groups, inner, span_bytes, out_size, in_size, BITS, GROUP_SIZE, OFFSETS,
        TABLE, SPAN, HAS_TAIL, BLOCK_N, BLOCK_M,
    )  # fmt: skip
    is_pair, is_column = pair < end, column < out_size
    if HAS_BIAS:
        own_bias = bias + expert.to(tl.int64) * out_size + column
        total += tl.load(own_bias, mask=is_column, other=0.0).to(tl.float32)[:, None]
    place = out + pair.to(tl.int64)[None, :] * out_size + column[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_column[:, None] & is_pair[None, :])


def bind(linears: Sequence[Layer], dtype: torch.dtype) -> Callable[[Tensor, Routing, bool], Tensor]:
    """Stacks the matrices. The layers keep views of the stack, so that each matrix is held once."""
    stack = Packed.stacked([linear.packed for linear in linears])
    first = linears[0].bias
    biases = None if first is None else torch.stack([linear.bias for linear in linears if linear.bias is not None])
    for expert, linear in enumerate(linears):
        linear.packed = stack[expert]
        linear.bias = None if biases is None else biases[expert]
    num_experts, num_groups, out_size = stack.scales.shape
    bits = stack.constants["BITS"]

    def apply(x: Tensor, routing: Routing, by_row: bool) -> Tensor:
        assert x.shape[1] == stack.in_size and x.dtype == dtype
        x, num_pairs = x.contiguous(), len(routing.rows)
        out = torch.empty((num_pairs, out_size), dtype=dtype, device=x.device)
        block_m = ROWS[0] if num_pairs <= ROWS[0] * num_experts else ROWS[1]
        most_tiles = min(num_pairs, triton.cdiv(num_pairs, block_m) + num_experts)
        _product[(most_tiles * triton.cdiv(out_size, _BLOCK_N),)](
            x,
            stack.weight,
            stack.scales,
            stack.offsets,
            stack.scales if biases is None else biases,
            routing.rows,
            routing.offsets,
            out,
            most_tiles,
            num_experts,
            stack.weight.shape[1],
            num_groups,
            out_size,
            stack.in_size,
            **stack.constants,
            HAS_TAIL=stack.in_size % STEP.value != 0,
            HAS_BIAS=biases is not None,
            BY_ROW=by_row,
            SCANNED=max(LEAST_SCANNED, triton.next_power_of_2(num_experts)),
            BLOCK_N=_BLOCK_N,
            BLOCK_M=block_m,
            num_warps=_BLOCK_N // COLUMNS_A_WARP,
            num_stages=stages_of(block_m, _BLOCK_N, bits, dtype.itemsize, gpu.properties_of(x.device)),
            maxnreg=registers(block_m, dtype.itemsize == 2),
        )
        return out

    return apply


def shipped() -> Iterator[Shipped]:
    """Every kind of matrix in bfloat16 and groups of 32, the group sizes of published experts, and every dtype."""
    for bits in (4, 8):
        tables = TABLES if bits == 4 else ("centred",)
        kinds = [*(("none", table) for table in tables), ("zeros", "centred"), ("minimums", "centred")]
        for (offsets, table), block_m in itertools.product(kinds, ROWS):
            yield _form(constants(bits, 32, offsets, table), block_m, "bf16")
        for group_size in (128, 0):
            yield _form(constants(bits, group_size, "none", "centred"), ROWS[0], "bf16")
        for dtype in ("fp16", "fp32"):
            yield _form(constants(bits, 32, "none", "centred"), ROWS[0], dtype)


def _form(made: dict[str, Any], block_m: int, dtype: str) -> Shipped:
    flags = dict.fromkeys(("HAS_TAIL", "HAS_BIAS", "BY_ROW"), False)
    return Shipped(
        op="experts_integers",
        config=f"{dtype} {made['BITS']} bits {name_of(made)} tile {_BLOCK_N} x {block_m}",
        kernel=_product,
        signature=types_of(_product, made, x=dtype, out=dtype, bias="bf16", rows="i32", starts="i32"),
        constants={**made, **flags, "SCANNED": LEAST_SCANNED, "BLOCK_N": _BLOCK_N, "BLOCK_M": block_m},
        num_warps=_BLOCK_N // COLUMNS_A_WARP,
        num_stages=STAGES,
        shared=shared_need(block_m, _BLOCK_N, made["BITS"], 4 if dtype == "fp32" else 2),
        options={"maxnreg": registers(block_m, dtype != "fp32")},
        is_matrix=dtype != "fp32",  # which is multiplied outside the tensor cores
        multiples=("out_size", "in_size"),
    )
