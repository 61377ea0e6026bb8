"""The Triton implementation: one launch for A and one for B.

A program takes sixteen rows in order and one of them as its candidate. It computes those of the sixteen that have the
candidate's adapter, unless an earlier one of them has it too. So a row is always part of a tile of sixteen, and shares
no sum with the others. A prompt's rows read the weights once in sixteen. Rows of different adapters run side by side.

A is multiplied on the tensor cores. Its results stay in fp32, and B is widened.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.device import SharedNeed
from inferd.kernels.gpu import DTYPES, Shipped
from inferd.kernels.gpu.tiles import STEP_BYTES
from inferd.kernels.ops.lora.weights import PANEL, LoraWeights

_ROWS, _NUM_WARPS, _STAGES = 16, 4, 3
_MIN_RANK, _MAX_RANK = 16, 64


@triton.jit
def _rows_of_candidate(slots, adapters, num_rows, ROWS: tl.constexpr):
    """(rows, whether each has the candidate's adapter, that adapter, or -1 if an earlier row's program computes it)."""
    place, candidate = tl.arange(0, ROWS), tl.program_id(0) % ROWS
    row = tl.program_id(0) // ROWS * ROWS + place
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    adapter = tl.load(adapters + slot, mask=slot >= 0, other=-1)
    own = tl.sum(tl.where(place == candidate, adapter, 0))
    first = tl.min(tl.where(adapter == own, place, ROWS))
    return row.to(tl.int64), adapter == own, tl.where(first == candidate, own, -1)


@triton.jit(do_not_specialize=["num_rows"])
def _shrink(
    x,
    down,
    ranks,
    scales,
    slots,
    adapters,
    shrunk,
    num_rows,
    in_size,
    x_stride,
    num_parts,
    rank,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, is_row, adapter = _rows_of_candidate(slots, adapters, num_rows, ROWS)
    if adapter < 0:
        return
    of_part = adapter * num_parts + tl.program_id(1)
    own_rank = tl.load(ranks + of_part)
    if own_rank == 0:
        return
    index, inner = tl.arange(0, RANK), tl.arange(0, BLOCK_K)
    x_place = x + row[:, None] * x_stride + inner[None, :]
    down_place = down + (of_part * rank + index[None, :]) * in_size + inner[:, None]
    total = tl.zeros((ROWS, RANK), tl.float32)
    for start in range(0, in_size, BLOCK_K):
        is_inner = inner < in_size - start
        x_tile = tl.load(x_place + start, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        weights = tl.load(down_place + start, mask=(index < own_rank)[None, :] & is_inner[:, None], other=0.0)
        total = tl.dot(x_tile, weights, total, input_precision="ieee")
    goal = shrunk + (row[:, None] * num_parts + tl.program_id(1)) * rank + index[None, :]
    tl.store(goal, total * tl.load(scales + of_part), mask=is_row[:, None] & (index < own_rank)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _expand(
    y,
    up,
    panels,
    ranks,
    slots,
    adapters,
    shrunk,
    num_rows,
    out_size,
    num_parts,
    rank,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    PANEL: tl.constexpr,
):
    row, is_row, adapter = _rows_of_candidate(slots, adapters, num_rows, ROWS)
    if adapter < 0:
        return
    panel, num_panels = tl.program_id(1), tl.num_programs(1)
    first, count, part = tl.load(panels + 3 * panel), tl.load(panels + 3 * panel + 1), tl.load(panels + 3 * panel + 2)
    own_rank = tl.load(ranks + adapter * num_parts + part)
    if own_rank == 0:
        return
    index, column = tl.arange(0, RANK), tl.arange(0, PANEL)
    is_own = index < own_rank
    numbers = tl.load(
        shrunk + (row[:, None] * num_parts + part) * rank + index[None, :],
        mask=is_row[:, None] & is_own[None, :],
        other=0.0,
    )
    weights = tl.load(
        up + ((adapter * num_panels + panel) * rank + index[:, None]) * PANEL + column[None, :],
        mask=is_own[:, None],
        other=0.0,
    )
    total = tl.dot(numbers, weights.to(tl.float32), input_precision="ieee")
    place = y + row[:, None] * out_size + first + column[None, :]
    is_inside = is_row[:, None] & (column < count)[None, :]
    total += tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(y.dtype.element_ty), mask=is_inside)


def add_lora(y: Tensor, x: Tensor, weights: LoraWeights, slots: Tensor, adapters: Tensor) -> None:
    num_rows = x.shape[0]
    if not num_rows:
        return
    x = x if x.stride(1) == 1 else x.contiguous()
    _, num_parts, rank, in_size = weights.down.shape
    shrunk = torch.empty((num_rows, num_parts, rank), dtype=torch.float32, device=x.device)
    candidates = triton.cdiv(num_rows, _ROWS) * _ROWS
    _shrink[(candidates, num_parts)](
        x,
        weights.down,
        weights.ranks,
        weights.scales,
        slots,
        adapters,
        shrunk,
        num_rows,
        in_size,
        x.stride(0),
        num_parts,
        rank,
        RANK=_padded(rank),
        ROWS=_ROWS,
        BLOCK_K=_step(x.dtype),
        num_warps=_NUM_WARPS,
        num_stages=_STAGES,
    )
    _expand[(candidates, weights.panels.shape[0])](
        y,
        weights.up,
        weights.panels,
        weights.ranks,
        slots,
        adapters,
        shrunk,
        num_rows,
        y.shape[1],
        num_parts,
        rank,
        RANK=_padded(rank),
        ROWS=_ROWS,
        PANEL=PANEL,
        num_warps=_warps(_padded(rank)),
    )


def _padded(rank: int) -> int:
    """Width of a tile of the rank: a power of two."""
    assert rank <= _MAX_RANK
    return max(_MIN_RANK, 1 << (rank - 1).bit_length())


def _warps(rank: int) -> int:
    """Warps that share a panel of B. Four would spill: with a rank of 64 in float32 on sm_100, and with 32 in 16 bits
    on sm_86 and sm_89."""
    return _NUM_WARPS if rank == _MIN_RANK else 2 * _NUM_WARPS


def _step(dtype: torch.dtype) -> int:
    """Inputs of one step."""
    return STEP_BYTES // dtype.itemsize


def shipped() -> Iterator[Shipped]:
    numbers = {"ranks": "*i32", "slots": "*i64", "adapters": "*i64", "shrunk": "*fp32", "num_rows": "i32"}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = DTYPES[dtype]
        for rank in (16, 32, 64):
            yield Shipped(
                op="lora_shrink",
                config=f"{name} rank {rank}",
                kernel=_shrink,
                signature={
                    **dict.fromkeys(("x", "down"), f"*{name}"),
                    "scales": "*fp32",
                    **numbers,
                    **dict.fromkeys(("in_size", "x_stride", "num_parts", "rank"), "i32"),
                },
                constants={"RANK": rank, "ROWS": _ROWS, "BLOCK_K": _step(dtype)},
                num_warps=_NUM_WARPS,
                num_stages=_STAGES,
                shared=SharedNeed((_ROWS + rank) * STEP_BYTES),
                is_warp_matrix=dtype != torch.float32,
                multiples=("in_size", "x_stride", "rank"),
            )
            yield Shipped(
                op="lora_expand",
                config=f"{name} rank {rank}",
                kernel=_expand,
                signature={
                    **dict.fromkeys(("y", "up"), f"*{name}"),
                    "panels": "*i32",
                    **numbers,
                    **dict.fromkeys(("out_size", "num_parts", "rank"), "i32"),
                },
                constants={"RANK": rank, "ROWS": _ROWS, "PANEL": PANEL},
                num_warps=_warps(rank),
                multiples=("out_size", "rank"),
            )
