"""Partial results of attention: their layout, how two are merged, and the kernel that finishes units that were cut.

A partial result covers a unit (`work.py`) over some of its keys. For each packed row it holds the peak of the scores,
the sum of the weights relative to that peak, and the values weighted by them. A slot holds one partial result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.gpu import DTYPES, Shipped, dependent_options

_ROWS = 16
"""Packed rows of one program of `_combine`."""
_NUM_WARPS = 4
_LOG2_E = tl.constexpr(math.log2(math.e))
_STAGES = tl.constexpr(6)
"""Slots on their way in `_combine`: 42 KB with heads of 128."""


@triton.jit
def no_result(BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The partial result of no keys. `total` has as many equal columns as the sum is computed in."""
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return peak, tl.zeros([BLOCK_M, COLUMNS], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def sink_peak(sinks, packed, head, group, is_from_start):
    """The peak of a unit's rows before its first key: their sinks as exponents of two. Their sum of weights is then 1.
    -inf in parts behind the first."""
    own = tl.load(sinks + head * group + packed % group) * _LOG2_E
    return tl.where(is_from_start, own, float("-inf"))


@triton.jit
def merge(peak, total, summed, more_peak, more_total, more_summed):
    """Add a partial result to an earlier one, after scaling both to their common peak. A peak of -inf means no key was
    seen."""
    top = tl.maximum(peak, more_peak)
    base = tl.where(top == float("-inf"), 0.0, top)
    old = tl.exp2(peak - base)[:, None]
    new = tl.exp2(more_peak - base)[:, None]
    total = tl.fma(total, old, more_total * new)
    summed = tl.fma(summed, old, more_summed * new)
    return top, total, summed


@triton.jit
def offset_of(unit, packed, head, num_heads, group):
    """Offsets of packed rows in q and out, in vectors of a head."""
    token = tl.load(unit + 1) + packed // group
    return token.to(tl.int64) * num_heads + head * group + packed % group


@triton.jit
def store_slot(slots, slot_stats, slot, slot_rows, peak, total, summed, D: tl.constexpr):
    row = tl.arange(0, summed.shape[0])
    column = tl.arange(0, summed.shape[1])
    is_row = row < slot_rows
    first = slot.to(tl.int64) * slot_rows
    place = slots + (first + row)[:, None] * D + column[None, :]
    tl.store(place, summed, mask=is_row[:, None] & (column < D)[None, :])
    tl.store(slot_stats + (first + row) * 2, peak, mask=is_row)
    # All its columns are equal.
    tl.store(slot_stats + (first + row) * 2 + 1, tl.max(total, 1), mask=is_row)


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads", "slot_rows"])
def _combine(
    out,
    slots,
    slot_stats,
    units,
    segments,
    num_heads,
    num_kv_heads,
    slot_rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IN_PARTS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program for each border between segments, KV head and block of rows. It adds up the unit that the border
    cuts, if no earlier border cuts it."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0) % num_kv_heads
    segment = segments + (1 + tl.program_id(0) // num_kv_heads) * 4
    group = num_heads // num_kv_heads
    before = tl.load(segment - 4)
    cut = tl.load(segment)
    unit = units + tl.load(segment + 1) * 8
    slot = tl.load(segment + 2) - 1
    unit_begin = tl.load(unit + 6)
    if (cut > unit_begin) & (before <= unit_begin):
        first_packed = tl.load(unit + 3)
        num_packed = tl.load(unit + 4)
        if IN_PARTS:
            # The last border before tile e of T is the last i of S with i * T / S < e.
            num_segments = tl.num_programs(0) // num_kv_heads + 1
            num_tiles = tl.load(segments + num_segments * 4)
            last = (tl.load(unit + 14).to(tl.int64) * num_segments + num_tiles - 1) // num_tiles - 1
            num_slots = tl.load(segments + last * 4 + 2) - slot + 1
        else:
            num_slots = tl.load(unit + 14) - cut + 1
        row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tl.arange(0, BLOCK_D)
        num_rows = tl.minimum(slot_rows, num_packed - first_packed)
        is_row = row < num_rows
        row = tl.minimum(row, num_rows - 1)
        is_column = (column < D)[None, :]
        peak, total, summed = no_result(BLOCK_M, 1, BLOCK_D)
        for index in tl.range(num_slots, num_stages=_STAGES):
            first = ((slot + index).to(tl.int64) * num_kv_heads + head) * slot_rows + row
            more_peak = tl.load(slot_stats + first * 2)
            more_total = tl.load(slot_stats + first * 2 + 1)
            more_summed = tl.load(slots + first[:, None] * D + column[None, :], mask=is_column, other=0.0)
            peak, total, summed = merge(peak, total, summed, more_peak, more_total[:, None], more_summed)
        offset = offset_of(unit, first_packed + row, head, num_heads, group) * D
        result = (summed / total).to(out.dtype.element_ty)
        tl.store(out + offset[:, None] + column[None, :], result, mask=is_row[:, None] & is_column)


def combine(
    out: Tensor,
    slots: Tensor,
    slot_stats: Tensor,
    units: Tensor,
    segments: Tensor,
    num_kv_heads: int,
    slot_rows: int,
    *,
    in_parts: bool,
) -> None:
    """Write the results of units that were cut to `out` [T, Hq, D]."""
    num_heads, head_dim = out.shape[1], out.shape[2]
    grid = ((segments.shape[0] - 2) * num_kv_heads, triton.cdiv(slot_rows, _ROWS))
    _combine[grid](
        out,
        slots,
        slot_stats,
        units,
        segments,
        num_heads,
        num_kv_heads,
        slot_rows,
        **_constants(head_dim, in_parts),
        **dependent_options(),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )


def _constants(head_dim: int, in_parts: bool) -> dict[str, object]:
    block_d = max(16, triton.next_power_of_2(head_dim))
    return {"D": head_dim, "BLOCK_D": block_d, "BLOCK_M": _ROWS, "IN_PARTS": in_parts}


def shipped() -> Iterator[Shipped]:
    for head_dim, in_parts in itertools.product((128, 256), (False, True)):
        yield Shipped(
            op="attention_combine",
            config=f"bf16 head {head_dim}{' in parts' if in_parts else ''}",
            kernel=_combine,
            signature={
                "out": f"*{DTYPES[torch.bfloat16]}",
                **dict.fromkeys(("slots", "slot_stats"), "*fp32"),
                **dict.fromkeys(("units", "segments"), "*i32"),
                **dict.fromkeys(("num_heads", "num_kv_heads", "slot_rows"), "i32"),
            },
            constants={**_constants(head_dim, in_parts), "IS_DEPENDENT": False},
            num_warps=_NUM_WARPS,
            is_streaming=True,
            options={"enable_fp_fusion": False},
        )
