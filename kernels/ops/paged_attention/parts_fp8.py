"""The kernel of `parts.py` for K and V in e4m3: decodes and drafts of steps that need not be deterministic.

Two codes lie side by side in 16 bits. Loaded as such, they are operands of the tensor cores without a byte being moved
alone. Integer operations turn them into two bfloat16, of an even and an odd element (`_HALVES`). So a head is two
halves: scores are the sum of two products, and the weighted values have two accumulators. Elements are numbers times
scales, rounded once, as in every other kernel. Only the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.gpu import Shipped
from inferd.kernels.ops.kv_format import KV_GROUP
from inferd.kernels.ops.paged_attention import passes
from inferd.kernels.ops.paged_attention.batch import ATTENTION_SPLIT
from inferd.kernels.ops.paged_attention.partial import offset_of, sink_peak
from inferd.kernels.ops.paged_attention.parts import edges_of, span_of, store_part, weigh
from inferd.kernels.ops.paged_attention.passes import Form
from inferd.kernels.ops.paged_attention.tiles import types_of

HALVES = """{
.reg .b32 low, sign, rest;
shl.b32 low, $2, 8;
and.b32 sign, low, 0x80008000;
shr.b32 rest, low, 4;
and.b32 rest, rest, 0x07F007F0;
or.b32 $0, sign, rest;
and.b32 sign, $2, 0x80008000;
shr.b32 rest, $2, 4;
and.b32 rest, rest, 0x07F007F0;
or.b32 $1, sign, rest;
}"""
"""Bits of bfloat16, two in a register: those of the lower codes ($0) and of the upper ones ($1). A code's exponent and
mantissa stand below the ends of bfloat16's, so the numbers are 2**120 too small; those without an exponent too."""
_HALVES = tl.constexpr(HALVES)
_BIAS = tl.constexpr(2.0**120)


@triton.jit
def _halves(codes, IS_COMPILED: tl.constexpr):
    """(lower, upper) numbers of pairs of e4m3 codes, exact in bfloat16. NaN becomes 480: its scale is NaN."""
    if IS_COMPILED:
        lower, upper = tl.inline_asm_elementwise(
            _HALVES, "=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        low = codes << 8
        lower = ((low & -32768) | ((low >> 4) & 0x07F0)).to(tl.bfloat16, bitcast=True)
        upper = ((codes & -32768) | ((codes >> 4) & 0x07F0)).to(tl.bfloat16, bitcast=True)
    bias = tl.full([], _BIAS, tl.float32).to(tl.bfloat16)
    return lower * bias, upper * bias


@triton.jit
def _elements(codes, scales, IS_COMPILED: tl.constexpr):
    """(even, odd) elements [keys, pairs] of a head: numbers times the scales [keys, groups] of their groups."""
    even, odd = _halves(codes, IS_COMPILED)
    grouped: tl.constexpr = [codes.shape[0], scales.shape[1], codes.shape[1] // scales.shape[1]]
    even = tl.reshape(tl.reshape(even, grouped) * scales[:, :, None], codes.shape)
    odd = tl.reshape(tl.reshape(odd, grouped) * scales[:, :, None], codes.shape)
    return even, odd


@triton.jit
def _rows(place, is_seen, IS_EDGE: tl.constexpr):
    """Codes or scales of a block of keys. At an edge, those of keys that no row sees are 0."""
    return tl.load(place, mask=is_seen[:, None], other=0) if IS_EDGE else tl.load(place)


@triton.jit
def _add_block(
    q_even, q_odd, k_place, to_v, k_scale_place, to_v_scales, key, is_seen, position, window, scale, peak, total,
    even, odd, IS_EDGE: tl.constexpr, IS_COMPILED: tl.constexpr,
):  # fmt: skip
    """(peak, sum of weights, weighted values of even and of odd elements) with a block of keys."""
    k_codes = _rows(k_place, is_seen, IS_EDGE)
    k_scales = _rows(k_scale_place, is_seen, IS_EDGE)
    k_even, k_odd = _elements(k_codes, k_scales, IS_COMPILED)
    scores = tl.dot(q_even, tl.trans(k_even))
    scores = tl.dot(q_odd, tl.trans(k_odd), scores)
    top, total, weights, decay = weigh(scores, peak, total, key, position, window, scale, 0.0, False, IS_EDGE)
    v_codes = _rows(k_place + to_v, is_seen, IS_EDGE)
    v_scales = _rows(k_scale_place + to_v_scales, is_seen, IS_EDGE)
    v_even, v_odd = _elements(v_codes, v_scales, IS_COMPILED)
    rounded = weights.to(q_even.dtype)
    even = tl.dot(rounded, v_even, even * decay[:, None])
    odd = tl.dot(rounded, v_odd, odd * decay[:, None])
    return top, total, even, odd


@triton.jit(do_not_specialize=["table_stride", "num_heads", "num_kv_heads", "block_shift", "window", "slot_rows"])
def _attend_parts_fp8(
    q, kv, kv_scales, sinks, out, slots, slot_stats, units, segments, tables, table_stride, num_heads, num_kv_heads,
    block_shift, window, slot_rows, scale, cap,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr,
    IS_COMPILED: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0) % num_kv_heads
    segment = segments + tl.program_id(0) // num_kv_heads * 4
    begin = tl.load(segment)
    end = tl.load(segment + 4)
    unit = units + tl.load(segment + 1) * 8
    group = num_heads // num_kv_heads
    NUM_GROUPS: tl.constexpr = D // GROUP
    PAIRS: tl.constexpr = D // 2
    pair = tl.arange(0, PAIRS)
    scale_group = tl.arange(0, NUM_GROUPS)
    o_key = tl.arange(0, BLOCK_N)
    in_page = (1 << block_shift) - 1
    to_v = num_kv_heads * (PAIRS << block_shift)
    to_v_scales = num_kv_heads * (NUM_GROUPS << block_shift)
    codes = kv.to(tl.pointer_type(tl.int16), bitcast=True) + head * (PAIRS << block_shift)
    kv_scales += head * (NUM_GROUPS << block_shift)
    while begin < end:
        stop, packed, position, low, high, full, end_full = span_of(
            unit, begin, end, group, window, BLOCK_M, BLOCK_N, TILE
        )
        q_offset = offset_of(unit, packed, head, num_heads, group) * D
        q_even = tl.load(q + q_offset[:, None] + 2 * pair[None, :])
        q_odd = tl.load(q + q_offset[:, None] + 2 * pair[None, :] + 1)
        table = tables + tl.load(unit).to(tl.int64) * table_stride
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:
            is_from_start = begin == tl.load(unit + 6)
            peak = sink_peak(sinks, packed, head, group, is_from_start)
            total += tl.where(is_from_start, 1.0, 0.0)
        even = tl.zeros([BLOCK_M, PAIRS], tl.float32)
        odd = tl.zeros([BLOCK_M, PAIRS], tl.float32)
        page = tl.load(table + (tl.minimum(full * BLOCK_N + o_key, high - 1) >> block_shift))
        for block in range(full, end_full):
            key = block * BLOCK_N + o_key
            place = codes + (page.to(tl.int64) * (2 * to_v) + (key & in_page) * PAIRS)[:, None] + pair[None, :]
            scale_place = page.to(tl.int64) * (2 * to_v_scales) + (key & in_page) * NUM_GROUPS
            # Load the pages of the next block one iteration ahead, else their loads would be a stage of the pipeline.
            page = tl.load(table + (tl.minimum(key + BLOCK_N, high - 1) >> block_shift))
            peak, total, even, odd = _add_block(
                q_even, q_odd, place, to_v, kv_scales + scale_place[:, None] + scale_group[None, :], to_v_scales,
                key, key >= 0, position, window, scale, peak, total, even, odd, False, IS_COMPILED,
            )  # fmt: skip
        num_before, num_edges = edges_of(low, high, full, end_full, BLOCK_N)
        for edge in range(num_edges):
            block = tl.where(edge < num_before, low // BLOCK_N + edge, end_full + edge - num_before)
            key = block * BLOCK_N + o_key
            is_seen = (key >= low) & (key < high)
            page = tl.load(table + (key >> block_shift), mask=is_seen, other=0)
            place = codes + (page.to(tl.int64) * (2 * to_v) + (key & in_page) * PAIRS)[:, None] + pair[None, :]
            scale_place = page.to(tl.int64) * (2 * to_v_scales) + (key & in_page) * NUM_GROUPS
            peak, total, even, odd = _add_block(
                q_even, q_odd, place, to_v, kv_scales + scale_place[:, None] + scale_group[None, :], to_v_scales,
                key, is_seen, position, window, scale, peak, total, even, odd, True, IS_COMPILED,
            )  # fmt: skip
        # Elements of both halves alternate again.
        summed = tl.reshape(tl.join(even, odd), [BLOCK_M, D])
        store_part(
            out, slots, slot_stats, unit, segment, begin, stop, head, num_heads, num_kv_heads, slot_rows, peak, total,
            summed, True, D,
        )  # fmt: skip
        begin = stop
        unit += 8


def launch(num_programs: int, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Launch the kernel with the arguments of `tiles.py`'s."""
    _attend_parts_fp8[(num_programs,)](*arguments, **options)


def constants(form: Form, head_dim: int, *, is_compiled: bool) -> dict[str, Any]:
    return {
        "D": head_dim,
        "BLOCK_M": form.block_m,
        "BLOCK_N": form.block_n,
        "TILE": ATTENTION_SPLIT,
        "GROUP": KV_GROUP,
        "IS_COMPILED": is_compiled,
    }


def shipped() -> Iterator[Shipped]:
    for head_dim in (64, 128, 256):
        for block_m in (16, 32):
            yield _shipped(head_dim, block_m)
    yield _shipped(64, 16, has_sinks=True)


def _shipped(head_dim: int, block_m: int, *, has_sinks: bool = False) -> Shipped:
    form = passes.part_form(head_dim, block_m, kv_bytes=1)
    return Shipped(
        op="attention_parts_fp8",
        config=f"bf16 head {head_dim} rows {block_m} cut{' sinks' if has_sinks else ''}",
        kernel=_attend_parts_fp8,
        signature=types_of(_attend_parts_fp8, torch.bfloat16, torch.float8_e4m3fn, has_sinks=has_sinks),
        constants={
            **constants(form, head_dim, is_compiled=True),
            "IS_DEPENDENT": False,
            **({} if has_sinks else {"sinks": None}),
        },
        num_warps=form.num_warps,
        num_stages=form.num_stages,
        shared=passes.shared_need(form, head_dim, 1),
        is_warp_matrix=True,
        is_streaming=True,
        options={"enable_fp_fusion": False, "maxnreg": form.max_registers},
        min_sm=passes.PARTS_MIN_SM,
    )
