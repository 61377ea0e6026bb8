"""The Triton kernel of steps whose bits may depend on how work is split: a program adds up all tiles of its part of a
unit at once, and a cut unit has one partial result for each part.

`tiles.py` says what a unit and its tiles are. Its kernel starts anew for each tile, so that no bit depends on
cuts. That costs a second set of sums, a merge for each tile, and a product with ones. This kernel keeps one set, and
sums weights in registers. Blocks of keys that all rows of the unit see come first, without a mask. The others, at the
diagonal and at the window's border, follow in a loop of their own.

Units that are not cut run in reverse: a prompt's last queries see most keys, so long units start first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.gpu import DTYPES, Shipped
from inferd.kernels.ops.paged_attention import passes
from inferd.kernels.ops.paged_attention.batch import ATTENTION_SPLIT
from inferd.kernels.ops.paged_attention.partial import offset_of, sink_peak, store_slot
from inferd.kernels.ops.paged_attention.passes import STEADY_ROWS, Form
from inferd.kernels.ops.paged_attention.tiles import types_of


@triton.jit
def _heads(place, is_seen, is_column, IS_EDGE: tl.constexpr, IS_PADDED: tl.constexpr):
    """[keys, elements] of K or V. A key that no row sees is not loaded: it may be NaN, and 0 * NaN is NaN."""
    if IS_EDGE:
        heads = tl.load(place, mask=is_seen[:, None] & is_column, other=0.0)
    elif IS_PADDED:
        heads = tl.load(place, mask=is_column, other=0.0)
    else:
        heads = tl.load(place)
    return heads


@triton.jit
def weigh(
    scores, peak, total, key, position, window, scale, cap, HAS_CAP: tl.constexpr, IS_EDGE: tl.constexpr
):  # fmt: skip
    """(peak, sum of weights, weights relative to the peak, factor of earlier sums) with a block of keys. Scores are as
    in `tiles.py`."""
    if HAS_CAP:
        scores = tl.fma(1.0 / (tl.exp2(scores * scale) + 1.0), -2.0 * cap, cap)
    if IS_EDGE:
        sees = (key[None, :] <= position[:, None]) & (key[None, :] > (position - window)[:, None])
        scores = tl.where(sees, scores, float("-inf"))
    top = tl.max(scores, 1)
    if not HAS_CAP:
        top = top * scale
    top = tl.maximum(peak, top)
    # A row that has seen no key yet has no peak. Only edges have such rows.
    base = tl.where(top == float("-inf"), 0.0, top) if IS_EDGE else top
    weights = tl.exp2(scores - base[:, None] if HAS_CAP else tl.fma(scores, scale, -base[:, None]))
    decay = tl.exp2(peak - base)
    return top, tl.fma(total, decay, tl.sum(weights, 1)), weights, decay


@triton.jit
def _add_block(
    b_q, k_place, to_v, key, is_seen, is_column, position, window, scale, cap, peak, total, summed,
    HAS_CAP: tl.constexpr, IS_EDGE: tl.constexpr, IS_PADDED: tl.constexpr,
):  # fmt: skip
    """(peak, sum of weights, weighted values) with a block of keys."""
    k = _heads(k_place, is_seen, is_column, IS_EDGE, IS_PADDED)
    scores = tl.dot(b_q, tl.trans(k), input_precision="ieee")
    top, total, weights, decay = weigh(scores, peak, total, key, position, window, scale, cap, HAS_CAP, IS_EDGE)
    v = _heads(k_place + to_v, is_seen, is_column, IS_EDGE, IS_PADDED)
    summed = tl.dot(weights.to(b_q.dtype), v, summed * decay[:, None], input_precision="ieee")
    return top, total, summed


@triton.jit
def span_of(unit, begin, end, group, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr):
    """A unit's part from tile `begin` on: (its last tile + 1, packed rows, their positions, low, high, full, end_full).
    Some row sees the keys [low, high), and all rows see those of the blocks [full, end_full)."""
    first_position = tl.load(unit + 2)
    first_packed = tl.load(unit + 3)
    num_packed = tl.load(unit + 4)
    first_key = (tl.load(unit + 5) - tl.load(unit + 6)) * TILE
    stop = tl.minimum(end, tl.load(unit + 14))
    # Rows past the last one repeat it.
    packed = tl.minimum(first_packed + tl.arange(0, BLOCK_M), num_packed - 1)
    position = first_position + packed // group
    first_query = first_position + first_packed // group
    last_query = first_position + (tl.minimum(first_packed + BLOCK_M, num_packed) - 1) // group
    low = tl.maximum(first_query - window + 1, first_key + begin * TILE)
    high = tl.minimum(last_query + 1, first_key + stop * TILE)
    full = (tl.maximum(last_query - window + 1, low) + BLOCK_N - 1) // BLOCK_N
    end_full = tl.maximum(tl.minimum(first_query + 1, high) // BLOCK_N, full)
    return stop, packed, position, low, high, full, end_full


@triton.jit
def edges_of(low, high, full, end_full, BLOCK_N: tl.constexpr):
    """(number of the blocks with a mask before the full ones, number of all blocks with a mask)."""
    end_block = (high + BLOCK_N - 1) // BLOCK_N
    num_before = tl.minimum(full, end_block) - low // BLOCK_N
    return num_before, num_before + tl.maximum(end_block - end_full, 0)


@triton.jit
def store_part(
    out, slots, slot_stats, unit, segment, begin, stop, head, num_heads, num_kv_heads, slot_rows, peak, total, summed,
    IS_CUT: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write the result of a whole unit, or the partial result of a part."""
    is_from_start = begin == tl.load(unit + 6)
    if is_from_start & (stop == tl.load(unit + 14)):
        packed = tl.load(unit + 3) + tl.arange(0, summed.shape[0])
        column = tl.arange(0, summed.shape[1])
        is_number = (packed < tl.load(unit + 4))[:, None] & (column < D)[None, :]
        offset = offset_of(unit, packed, head, num_heads, num_heads // num_kv_heads) * D
        result = summed / total[:, None]
        tl.store(out + offset[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=is_number)
    elif IS_CUT:
        slot = tl.where(is_from_start, tl.load(segment + 6) - 1, tl.load(segment + 2))
        store_slot(slots, slot_stats, slot * num_kv_heads + head, slot_rows, peak, total[:, None], summed, D)


@triton.jit(do_not_specialize=["table_stride", "num_heads", "num_kv_heads", "block_shift", "window", "slot_rows"])
def _attend_parts(
    q, kv, sinks, out, slots, slot_stats, units, segments, tables, table_stride, num_heads, num_kv_heads, block_shift,
    window, slot_rows, scale, cap,
    HAS_CAP: tl.constexpr, IS_CUT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TILE: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0) % num_kv_heads
    index = tl.program_id(0) // num_kv_heads
    if not IS_CUT:
        index = tl.num_programs(0) // num_kv_heads - 1 - index
    segment = segments + index * 4
    begin = tl.load(segment)
    end = tl.load(segment + 4)
    unit = units + tl.load(segment + 1) * 8
    group = num_heads // num_kv_heads
    column = tl.arange(0, BLOCK_D)
    is_column = (column < D)[None, :]
    o_key = tl.arange(0, BLOCK_N)
    in_page = (1 << block_shift) - 1
    to_v = num_kv_heads * (D << block_shift)
    kv += head * (D << block_shift)
    while begin < end:
        stop, packed, position, low, high, full, end_full = span_of(
            unit, begin, end, group, window, BLOCK_M, BLOCK_N, TILE
        )
        q_offset = offset_of(unit, packed, head, num_heads, group) * D
        b_q = tl.load(q + q_offset[:, None] + column[None, :], mask=is_column, other=0.0)
        table = tables + tl.load(unit).to(tl.int64) * table_stride
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:
            is_from_start = begin == tl.load(unit + 6)
            peak = sink_peak(sinks, packed, head, group, is_from_start)
            total += tl.where(is_from_start, 1.0, 0.0)
        summed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        page = tl.load(table + (tl.minimum(full * BLOCK_N + o_key, high - 1) >> block_shift))
        for block in range(full, end_full):
            key = block * BLOCK_N + o_key
            place = kv + (page.to(tl.int64) * (2 * to_v) + (key & in_page) * D)[:, None] + column[None, :]
            # Load the pages of the next block one iteration ahead, else their loads would be a stage of the pipeline.
            page = tl.load(table + (tl.minimum(key + BLOCK_N, high - 1) >> block_shift))
            peak, total, summed = _add_block(
                b_q, place, to_v, key, key >= 0, is_column, position, window, scale, cap, peak, total, summed,
                HAS_CAP, False, D != BLOCK_D,
            )  # fmt: skip
        num_before, num_edges = edges_of(low, high, full, end_full, BLOCK_N)
        for edge in range(num_edges):
            block = tl.where(edge < num_before, low // BLOCK_N + edge, end_full + edge - num_before)
            key = block * BLOCK_N + o_key
            is_seen = (key >= low) & (key < high)
            page = tl.load(table + (key >> block_shift), mask=is_seen, other=0)
            place = kv + (page.to(tl.int64) * (2 * to_v) + (key & in_page) * D)[:, None] + column[None, :]
            peak, total, summed = _add_block(
                b_q, place, to_v, key, is_seen, is_column, position, window, scale, cap, peak, total, summed,
                HAS_CAP, True, D != BLOCK_D,
            )  # fmt: skip
        store_part(
            out, slots, slot_stats, unit, segment, begin, stop, head, num_heads, num_kv_heads, slot_rows, peak, total,
            summed, IS_CUT, D,
        )  # fmt: skip
        begin = stop
        unit += 8


def launch(num_programs: int, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Launch the kernel with the arguments of `tiles.py`'s. It has no use for scales of K and V."""
    q, kv, _, *others = arguments
    _attend_parts[(num_programs,)](q, kv, *others, **options)


def constants(form: Form, head_dim: int, *, has_cap: bool, is_cut: bool) -> dict[str, Any]:
    return {
        "HAS_CAP": has_cap,
        "IS_CUT": is_cut,
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_M": form.block_m,
        "BLOCK_N": form.block_n,
        "TILE": ATTENTION_SPLIT,
    }


def shipped() -> Iterator[Shipped]:
    bf16, fp16 = torch.bfloat16, torch.float16
    for head_dim, blocks in ((64, (16, 32, 64, 128)), (128, (16, 32, 64, 128)), (256, (16, 32, 64))):
        yield from (_shipped(head_dim, bf16, block_m, is_cut=True) for block_m in blocks if block_m <= 64)
        yield _shipped(head_dim, bf16, blocks[-1], is_cut=False)
    for head_dim, has_cap in ((80, False), (256, True)):
        yield _shipped(head_dim, bf16, 16, is_cut=True, has_cap=has_cap)
        yield _shipped(head_dim, bf16, passes.largest_whole(head_dim), is_cut=False, has_cap=has_cap)
    yield _shipped(128, fp16, 16, is_cut=True)
    yield _shipped(128, fp16, 128, is_cut=False)
    yield _shipped(64, bf16, 16, is_cut=True, has_sinks=True)
    yield _shipped(64, bf16, 128, is_cut=False, has_sinks=True)


def _shipped(
    head_dim: int,
    dtype: torch.dtype,
    block_m: int,
    *,
    is_cut: bool,
    has_cap: bool = False,
    has_sinks: bool = False,
) -> Shipped:
    form = passes.part_form(head_dim, block_m, kv_bytes=2)
    kind = f"{'cut' if is_cut else 'whole'}{' cap' if has_cap else ''}{' sinks' if has_sinks else ''}"
    return Shipped(
        op="attention_parts",
        config=f"{DTYPES[dtype]} head {head_dim} rows {block_m} {kind}",
        kernel=_attend_parts,
        signature=types_of(_attend_parts, dtype, dtype, has_sinks=has_sinks),
        constants={
            **constants(form, head_dim, has_cap=has_cap, is_cut=is_cut),
            "IS_DEPENDENT": False,
            **({} if has_sinks else {"sinks": None}),
        },
        num_warps=form.num_warps,
        num_stages=form.num_stages,
        shared=passes.shared_need(form, head_dim, 2),
        is_matrix=block_m > STEADY_ROWS,
        is_warp_matrix=block_m <= STEADY_ROWS,
        is_streaming=True,
        options={"enable_fp_fusion": False, "maxnreg": form.max_registers},
        min_sm=passes.PARTS_MIN_SM,
    )
