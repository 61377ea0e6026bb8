"""The Triton kernel whose bits depend on no cut (flash attention, Dao et al. 2022, arXiv:2205.14135; stream-K, Osama et
al. 2023, arXiv:2301.03598). `parts.py` has the kernel of steps that need not be deterministic, and `partial.py` the one
that combines cut units.

A program computes a segment of the work list (`work.py`) for one KV head, unit by unit. Each tile of `ATTENTION_SPLIT`
keys starts anew and gives a partial result: its peak, the sum of its weights, its weighted values. Partial results are
added in the order of tiles. If the program has the unit from its first tile on, it adds them in registers. Else it
stores each, and `partial.py` continues by the same arithmetic. So a result's bits depend neither on cuts nor on the
block of packed rows:
- A tile, or a part of one, that a query does not see changes nothing of it: weights are 0, the peak stays, decay is 1.
- The sum of weights is a product with ones, in the order of keys like the weighted values. Peaks are not rounded.
- Products and sums round as they are written: the compiler fuses none (`enable_fp_fusion`), and `fma` rounds once.

Two properties are left to the hardware. Adding products that are all 0 must leave a sum unchanged. Instructions for
other numbers of rows must round alike. Blocks of 16 and 32 use one instruction (mma.sync m16n8k16). Larger ones may use
others, and do not occur if `AttentionBatch.is_deterministic`.

The floor of decodes is memory: each K and V that is seen is read once, 2 * D numbers a key and KV head, and with 8 bits
2 scales for each group of 32. Cuts add packed rows * (D + 2) * 4 bytes, written and read once, for each tile behind
another in its unit. With 4 query heads a KV head and bfloat16 that is 1.6% of the tile's bytes, with 8 heads and 8 bits
6.0%. If there are fewer rows than programs it concerns all tiles; with many rows only those at the start of a segment.
A unit that was not cut is written at once. The floor of chunks is arithmetic: 4 * D operations for each query head and
each key that it sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.device import FP8_MIN_SM
from inferd.kernels.gpu import DTYPES, Shipped
from inferd.kernels.ops.kv_format import KV_GROUP, KV_SCALE_DTYPE
from inferd.kernels.ops.paged_attention import passes
from inferd.kernels.ops.paged_attention.batch import ATTENTION_SPLIT
from inferd.kernels.ops.paged_attention.partial import merge, no_result, offset_of, sink_peak, store_slot
from inferd.kernels.ops.paged_attention.passes import STEADY_ROWS, Form


@triton.jit
def _dequantized(numbers, scales, GROUP: tl.constexpr):
    """[keys, elements] in fp32: numbers of 8 bits times the scales [keys, groups] of their groups."""
    wide = tl.reshape(numbers.to(tl.float32), [numbers.shape[0], scales.shape[1], GROUP])
    return tl.reshape(wide * scales.to(tl.float32)[:, :, None], numbers.shape)


@triton.jit
def _scores(b_q, k, key, position, window, scale, cap, HAS_CAP: tl.constexpr):
    """[packed rows, keys] as exponents of two, once multiplied by `scale`; with a cap as they are. -inf if a row does
    not see the key."""
    scores = tl.dot(b_q, tl.trans(k), input_precision="ieee")
    if HAS_CAP:
        # cap * tanh(x / 2) = cap - 2 cap / (exp(x) + 1)
        scores = tl.fma(1.0 / (tl.exp2(scores * scale) + 1.0), -2.0 * cap, cap)
    seen = (key[None, :] <= position[:, None]) & (key[None, :] > (position - window)[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _weights(scores, peak, scale, HAS_CAP: tl.constexpr):
    """(weights relative to the new peak, factor for sums relative to the old peak, the new peak)."""
    top = tl.max(scores, 1)
    if not HAS_CAP:
        top = top * scale
    top = tl.maximum(peak, top)
    base = tl.where(top == float("-inf"), 0.0, top)
    scores = scores - base[:, None] if HAS_CAP else tl.fma(scores, scale, -base[:, None])
    return tl.exp2(scores), tl.exp2(peak - base)[:, None], top


@triton.jit
def _visible_keys(first_position, first_packed, num_packed, group, window, first_key, end_key, BLOCK_M: tl.constexpr):
    """[low, high): the keys among [first_key, end_key) that some query of the block of packed rows sees."""
    last_query = (tl.minimum(first_packed + BLOCK_M, num_packed) - 1) // group
    low = tl.maximum(first_position + first_packed // group - window + 1, first_key)
    return low, tl.minimum(first_position + last_query + 1, end_key)


@triton.jit
def _store_result(out, unit, head, num_heads, group, total, summed, D: tl.constexpr):
    """Write a unit's result. Reads the unit's fields again, because keeping them through the loop over keys would take
    registers."""
    packed = tl.load(unit + 3) + tl.arange(0, summed.shape[0])
    column = tl.arange(0, summed.shape[1])
    is_number = (packed < tl.load(unit + 4))[:, None] & (column < D)[None, :]
    offset = offset_of(unit, packed, head, num_heads, group) * D
    result = summed / tl.max(total, 1)[:, None]
    tl.store(out + offset[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=is_number)


@triton.jit(do_not_specialize=["table_stride", "num_heads", "num_kv_heads", "block_shift", "window", "slot_rows"])
def _attend(
    q, kv, kv_scales, sinks, out, slots, slot_stats, units, segments, tables, table_stride, num_heads,
    num_kv_heads, block_shift, window, slot_rows, scale, cap,
    HAS_CAP: tl.constexpr, IS_CUT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Scores count powers of two: `scale` includes log2(e). With a cap c, `scale` is that of 2 s / c, and `cap` is c
    log2(e). K and V in 8 bits are multiplied by their scales, and rounded to q's dtype. Without sinks `sinks` is None.
    """
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    HAS_SCALES: tl.constexpr = kv.dtype.element_ty.primitive_bitwidth == 8
    NUM_SCALES: tl.constexpr = (D + GROUP - 1) // GROUP
    scale_group = tl.arange(0, BLOCK_D // GROUP)
    head = tl.program_id(0) % num_kv_heads
    segment = segments + (tl.program_id(0) // num_kv_heads) * 4
    group = num_heads // num_kv_heads
    begin = tl.load(segment)
    end = tl.load(segment + 4)
    unit = units + tl.load(segment + 1) * 8
    first_slot = tl.load(segment + 2)
    last_slot = tl.load(segment + 6)
    column = tl.arange(0, BLOCK_D)
    is_column = (column < D)[None, :]
    ones = tl.full([BLOCK_N, 8], 1.0, tl.float32).to(q.dtype.element_ty)
    page_size = D << block_shift
    while begin < end:
        row = tl.load(unit)
        first_position = tl.load(unit + 2)
        first_packed = tl.load(unit + 3)
        num_packed = tl.load(unit + 4)
        first_tile = tl.load(unit + 5)
        unit_begin = tl.load(unit + 6)
        unit_end = tl.load(unit + 14)
        stop = tl.minimum(end, unit_end)
        is_from_start = (begin == unit_begin) if IS_CUT else True

        # Rows past the last one repeat it.
        packed = tl.minimum(first_packed + tl.arange(0, BLOCK_M), num_packed - 1)
        position = first_position + packed // group
        q_offset = offset_of(unit, packed, head, num_heads, group) * D
        b_q = tl.load(q + q_offset[:, None] + column[None, :], mask=is_column, other=0.0)

        first_key, end_key = (first_tile + begin - unit_begin) * TILE, (first_tile + stop - unit_begin) * TILE
        low, high = _visible_keys(first_position, first_packed, num_packed, group, window, first_key, end_key, BLOCK_M)
        table = tables + row.to(tl.int64) * table_stride
        peak, total, summed = no_result(BLOCK_M, 8, BLOCK_D)
        if sinks is not None:
            peak = sink_peak(sinks, packed, head, group, True)
            total += 1.0
        tile_peak, tile_total, tile_summed = no_result(BLOCK_M, 8, BLOCK_D)
        slot = tl.where(is_from_start, last_slot - 1, first_slot)
        last_block = (high - 1) // BLOCK_N
        key = low // BLOCK_N * BLOCK_N + tl.arange(0, BLOCK_N)
        page = tl.load(table + (key >> block_shift), mask=(key >= low) & (key < high), other=0)
        for block in range(low // BLOCK_N, last_block + 1):
            key = block * BLOCK_N + tl.arange(0, BLOCK_N)
            # A key that is not seen is not loaded: it may be NaN, and 0 * NaN is NaN.
            is_seen = (key >= low) & (key < high)
            inside = (key & ((1 << block_shift) - 1)) * D
            k_offset = (page.to(tl.int64) * (2 * num_kv_heads) + head) * page_size + inside
            if HAS_SCALES:
                k_place = ((page * (2 * num_kv_heads) + head) << block_shift) + (key & ((1 << block_shift) - 1))
                k_scale_place = k_place[:, None] * NUM_SCALES + scale_group[None, :]
                is_scale = is_seen[:, None] & (scale_group < NUM_SCALES)[None, :]
                k_scales = tl.load(kv_scales + k_scale_place, mask=is_scale, other=0.0)
            # Load the pages of the next block one iteration ahead, else their loads would be a stage of the pipeline.
            page = tl.load(table + ((key + BLOCK_N) >> block_shift), mask=key + BLOCK_N < high, other=0)
            is_kv = is_seen[:, None] & is_column
            k = tl.load(kv + k_offset[:, None] + column[None, :], mask=is_kv, other=0.0)
            if HAS_SCALES:
                k = _dequantized(k, k_scales, GROUP)
            k = k.to(b_q.dtype)
            scores = _scores(b_q, k, key, position, window, scale, cap, HAS_CAP)
            weights, decay, tile_peak = _weights(scores, tile_peak, scale, HAS_CAP)
            v_offset = k_offset + num_kv_heads * page_size
            v = tl.load(kv + v_offset[:, None] + column[None, :], mask=is_kv, other=0.0)
            if HAS_SCALES:
                v_scale_place = k_scale_place + (num_kv_heads << block_shift) * NUM_SCALES
                v = _dequantized(v, tl.load(kv_scales + v_scale_place, mask=is_scale, other=0.0), GROUP)
            v = v.to(b_q.dtype)
            # Round before summing, so that the divisor is the sum of the weights that were used.
            weights = weights.to(b_q.dtype)
            tile_total = tl.dot(weights, ones, tile_total * decay, input_precision="ieee")
            tile_summed = tl.dot(weights, v, tile_summed * decay, input_precision="ieee")
            if ((block + 1) % (TILE // BLOCK_N) == 0) | (block == last_block):
                if IS_CUT:
                    if is_from_start:
                        peak, total, summed = merge(peak, total, summed, tile_peak, tile_total, tile_summed)
                    else:
                        place = slot * num_kv_heads + head
                        store_slot(slots, slot_stats, place, slot_rows, tile_peak, tile_total, tile_summed, D)
                        slot += 1
                else:
                    peak, total, summed = merge(peak, total, summed, tile_peak, tile_total, tile_summed)
                tile_peak, tile_total, tile_summed = no_result(BLOCK_M, 8, BLOCK_D)
        if is_from_start:
            if stop == unit_end:
                _store_result(out, unit, head, num_heads, group, total, summed, D)
            elif IS_CUT:
                store_slot(slots, slot_stats, slot * num_kv_heads + head, slot_rows, peak, total, summed, D)
        begin = stop
        unit += 8


def launch(num_programs: int, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    _attend[(num_programs,)](*arguments, **options)


def constants(form: Form, head_dim: int, *, has_cap: bool, is_cut: bool) -> dict[str, Any]:
    block_d = max(16, triton.next_power_of_2(head_dim))
    return {
        "HAS_CAP": has_cap,
        "IS_CUT": is_cut,
        "D": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_M": form.block_m,
        "BLOCK_N": form.block_n,
        "GROUP": min(KV_GROUP, block_d),
        "TILE": ATTENTION_SPLIT,
    }


def limits(form: Form, *, has_sinks: bool) -> dict[str, int]:
    """Compiler options. With sinks the assembler would aim at 128 registers, and spill on sm_86 and sm_89."""
    return {"maxnreg": form.max_registers} if has_sinks else {}


def shipped() -> Iterator[Shipped]:
    """Forms with few variants of parameters that change little: a head's size between 64 and 128 changes masks, float16
    the name of an instruction."""
    bf16, fp16, fp8, int8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
    for head_dim in (64, 128, 256):
        for block_m in (16, 32):
            yield _shipped(head_dim, bf16, bf16, block_m, is_cut=True)
    # From then on `parts.py` computes what need not be deterministic.
    last = passes.PARTS_MIN_SM - 1
    yield _shipped(128, bf16, bf16, 64, is_cut=True, max_sm=last)
    for head_dim in (64, 128, 256):
        yield _shipped(head_dim, bf16, bf16, passes.largest_block(head_dim), is_cut=False, max_sm=last)
    for head_dim, kv_dtype, has_cap in ((80, bf16, False), (128, fp8, False), (256, bf16, True), (256, fp8, True)):
        sm = FP8_MIN_SM if kv_dtype == fp8 else 0
        yield _shipped(head_dim, bf16, kv_dtype, 16, is_cut=True, has_cap=has_cap, sm=sm)
        most = 999 if kv_dtype == fp8 else last
        block_m = passes.largest_block(head_dim)
        yield _shipped(head_dim, bf16, kv_dtype, block_m, is_cut=False, has_cap=has_cap, sm=sm, max_sm=most)
    for head_dim, block_m in ((64, 16), (128, 32), (128, 64)):
        yield _shipped(head_dim, bf16, fp8, block_m, is_cut=True, sm=FP8_MIN_SM)
    for head_dim, block_m in ((64, 16), (80, 16), (128, 16), (128, 64), (256, 16)):
        yield _shipped(head_dim, bf16, int8, block_m, is_cut=True)
    for head_dim in (128, 256):
        yield _shipped(head_dim, bf16, int8, passes.largest_block(head_dim), is_cut=False)
    yield _shipped(128, fp16, fp8, 16, is_cut=True, sm=FP8_MIN_SM)
    yield _shipped(128, fp16, int8, 16, is_cut=True)
    yield _shipped(128, fp16, fp16, 16, is_cut=True)
    yield _shipped(64, bf16, bf16, 16, is_cut=True, has_sinks=True)
    yield _shipped(64, bf16, bf16, passes.largest_block(64), is_cut=False, has_sinks=True, max_sm=last)
    for kv_dtype, sm in ((fp8, FP8_MIN_SM), (int8, 0)):
        yield _shipped(64, bf16, kv_dtype, 16, is_cut=True, has_sinks=True, sm=sm)


def types_of(kernel: Any, dtype: torch.dtype, kv_dtype: torch.dtype, *, has_sinks: bool) -> dict[str, str]:
    """Types by name of those of the arguments, which all kernels of attention have in common, that `kernel` takes."""
    integers = ("table_stride", "num_heads", "num_kv_heads", "block_shift", "window", "slot_rows")
    types = {
        **dict.fromkeys(("q", "out"), f"*{DTYPES[dtype]}"),
        "kv": f"*{DTYPES[kv_dtype]}",
        **dict.fromkeys(("slots", "slot_stats", *(["sinks"] if has_sinks else ())), "*fp32"),
        "kv_scales": f"*{DTYPES[KV_SCALE_DTYPE if kv_dtype.itemsize == 1 else torch.float32]}",
        **dict.fromkeys(("units", "segments", "tables"), "*i32"),
        **dict.fromkeys(integers, "i32"),
        **dict.fromkeys(("scale", "cap"), "fp32"),
    }
    return {name: kind for name, kind in types.items() if name in kernel.arg_names}


def _shipped(
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_m: int,
    *,
    is_cut: bool,
    has_cap: bool = False,
    has_sinks: bool = False,
    sm: int = 0,
    max_sm: int = 999,
) -> Shipped:
    form = passes.form(head_dim, kv_dtype.itemsize, block_m)
    kind = f"{'cut' if is_cut else 'whole'}{' cap' if has_cap else ''}{' sinks' if has_sinks else ''}"
    return Shipped(
        op="paged_attention",
        config=f"{DTYPES[dtype]} kv {DTYPES[kv_dtype]} head {head_dim} rows {block_m} {kind}",
        kernel=_attend,
        signature=types_of(_attend, dtype, kv_dtype, has_sinks=has_sinks),
        constants={
            **constants(form, head_dim, has_cap=has_cap, is_cut=is_cut),
            "IS_DEPENDENT": False,
            **({} if has_sinks else {"sinks": None}),
        },
        num_warps=form.num_warps,
        num_stages=form.num_stages,
        shared=passes.shared_need(form, head_dim, kv_dtype.itemsize),
        is_matrix=block_m > STEADY_ROWS,
        is_warp_matrix=block_m <= STEADY_ROWS,
        is_streaming=True,
        options={"enable_fp_fusion": False, **limits(form, has_sinks=has_sinks)},
        min_sm=sm,
        max_sm=max_sm,
    )
