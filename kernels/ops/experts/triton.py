"""The Triton product of pairs and their experts' matrices, for unquantized weights.

A program computes a tile of results of one expert. It finds its expert from the offsets, on the device. So a launch
depends on the number of pairs alone, and a CUDA graph can record it. Experts without pairs have no tile, and their
weights are not read. All inputs are walked in equal steps, in order, by tiles of one size, as in `linear/triton.py`: a
row's bits depend on that row alone.
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
from inferd.kernels.gpu import DTYPES, Shipped
from inferd.kernels.gpu.tiles import (
    LEAST_SCANNED,
    STAGES,
    STEP_BYTES,
    expert_tile,
    operands,
    shared_need,
    stages_of,
)
from inferd.kernels.ops.experts import triton_integers, triton_routing
from inferd.kernels.ops.experts.reference import Routing

_BLOCK_M, _BLOCK_N, _NUM_WARPS = 64, 64, 4


@triton.jit(do_not_specialize=["most_tiles"])
def _product(
    x,
    weights,
    biases,
    rows,
    offsets,
    out,
    most_tiles,
    num_experts,
    out_size,
    in_size,
    BY_ROW: tl.constexpr,
    SCANNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`biases` is None without biases."""
    tile, first_column = tl.program_id(0) % most_tiles, tl.program_id(0) // most_tiles * BLOCK_N
    expert, first, end = expert_tile(offsets, num_experts, tile, BLOCK_M, SCANNED)
    if end == 0:
        return
    pair, column, inner = first + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_pair, is_column = pair < end, column < out_size
    row = tl.load(rows + pair, mask=is_pair, other=0) if BY_ROW else pair
    weight = weights + expert.to(tl.int64) * out_size * in_size
    x_place, weight_place = operands(x, weight, row, column, inner, in_size, in_size)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_size, BLOCK_K):
        is_inner = inner < in_size - start
        x_tile = tl.load(x_place + start, mask=is_pair[:, None] & is_inner[None, :], other=0.0)
        weight_tile = tl.load(weight_place + start, mask=is_column[None, :] & is_inner[:, None], other=0.0)
        total = tl.dot(x_tile, weight_tile, total, input_precision="ieee")
    if biases is not None:
        own = tl.load(biases + expert.to(tl.int64) * out_size + column, mask=is_column, other=0.0)
        total += own.to(tl.float32)[None, :]
    place = out + pair.to(tl.int64)[:, None] * out_size + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


def bind(linears: Sequence[Any], dtype: torch.dtype) -> Callable[[Tensor, Routing, bool], Tensor]:
    """Stacks the weights, and the biases if there are any. The layers keep views of the stack, so that each weight is
    held once."""
    weights = torch.stack([linear.weight for linear in linears])
    biases = None if linears[0].bias is None else torch.stack([linear.bias for linear in linears])
    for expert, linear in enumerate(linears):
        linear.weight = weights[expert]
        if biases is not None:
            linear.bias = biases[expert]
    num_experts, out_size, in_size = weights.shape

    def apply(x: Tensor, routing: Routing, by_row: bool) -> Tensor:
        assert x.shape[1] == in_size and x.dtype == dtype
        x, num_pairs = x.contiguous(), len(routing.rows)
        out = torch.empty((num_pairs, out_size), dtype=dtype, device=x.device)
        most_tiles = min(num_pairs, triton.cdiv(num_pairs, _BLOCK_M) + num_experts)
        _product[(most_tiles * triton.cdiv(out_size, _BLOCK_N),)](
            x,
            weights,
            biases,
            routing.rows,
            routing.offsets,
            out,
            most_tiles,
            num_experts,
            out_size,
            in_size,
            BY_ROW=by_row,
            SCANNED=max(LEAST_SCANNED, triton.next_power_of_2(num_experts)),
            BLOCK_M=_BLOCK_M,
            BLOCK_N=_BLOCK_N,
            BLOCK_K=STEP_BYTES // dtype.itemsize,
            num_warps=_NUM_WARPS,
            num_stages=stages_of("experts", _BLOCK_M, _BLOCK_N, dtype.itemsize, gpu.properties_of(x.device)),
        )
        return out

    return apply


def shipped() -> Iterator[Shipped]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for dtype, by_row, scanned in itertools.product(dtypes, (True, False), (LEAST_SCANNED, 2 * LEAST_SCANNED)):
        yield _shipped(dtype, by_row, scanned)
    yield from (_shipped(torch.bfloat16, by_row, LEAST_SCANNED, has_bias=True) for by_row in (True, False))
    yield from triton_integers.shipped()
    yield from triton_routing.shipped()


def _shipped(dtype: torch.dtype, by_row: bool, scanned: int, *, has_bias: bool = False) -> Shipped:
    name = DTYPES[dtype]
    return Shipped(
        op="experts_product",
        config=f"{name} {scanned} experts{' by row' if by_row else ''}{' bias' if has_bias else ''}",
        kernel=_product,
        signature={
            **dict.fromkeys(("x", "weights", *(["biases"] if has_bias else ())), f"*{name}"),
            **dict.fromkeys(("rows", "offsets"), "*i32"),
            "out": f"*{name}",
            **dict.fromkeys(("most_tiles", "num_experts", "out_size", "in_size"), "i32"),
        },
        constants={
            **({} if has_bias else {"biases": None}),
            "BY_ROW": by_row,
            "SCANNED": scanned,
            "BLOCK_M": _BLOCK_M,
            "BLOCK_N": _BLOCK_N,
            "BLOCK_K": STEP_BYTES // dtype.itemsize,
        },
        num_warps=_NUM_WARPS,
        num_stages=STAGES,
        shared=shared_need(_BLOCK_M, _BLOCK_N, dtype.itemsize),
        is_matrix=dtype != torch.float32,
        is_streaming=True,
        multiples=("out_size", "in_size"),
    )
