"""The Triton implementation: chunks of 1024 tokens are sorted separately, then one program a row finds its thresholds.
It asks each chunk how many tokens, and how much mass, lie at or above a bound.

Scores are compared by an integer image that keeps their order. The largest image that still reaches a target is found
bit by bit from the top: 32 steps for any row. A chunk has 32 blocks of 32. It answers a step from the last image of
each block, which stay in registers, and from the one block that contains the bound. Sums are of whole numbers, and
weights are made of products and sums that are not fused (`UNFUSED`), so the thresholds equal the reference's.

Bytes a token: 16 (scores read twice and written once, images written once), 8 for a min-p alone, 0 without a cut.
Memory: 4.4 bytes a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import Shipped
from inferd.kernels.ops.top_k_top_p import weights as definition

SORT_BLOCK = 32
_CHUNK = SORT_BLOCK * SORT_BLOCK
SORT_WARPS, _SELECT_WARPS, _CUT_WARPS = 1, 16, 4
UNFUSED = {"enable_fp_fusion": False}
_LOWEST = tl.constexpr(definition.LOWEST)
_LOG2_E = tl.constexpr(definition.LOG2_E)
_LN2_HIGH, _LN2_LOW = tl.constexpr(definition.LN2_HIGH), tl.constexpr(definition.LN2_LOW)
_WHOLE = tl.constexpr(definition.WHOLE)
_FRACTION_BITS = tl.constexpr(definition.FRACTION_BITS)
_C6, _C5, _C4, _C3, _C2 = (tl.constexpr(value) for value in definition.COEFFICIENTS[:5])
_BEHIND = tl.constexpr(-0x7F800001)
"""The image of -inf, which stands for missing tokens: it weighs nothing, and a bound this low cuts nothing."""


@triton.jit
def image_of(scores):
    """int32 with the order of the scores; both zeros have one image."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(image):
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights_of(scores):
    """Weights as `weights.py` defines them."""
    x = tl.maximum(scores, _LOWEST)
    exponent = (x * _LOG2_E + _WHOLE) - _WHOLE
    r = (x - exponent * _LN2_HIGH) - exponent * _LN2_LOW
    power = ((((r * _C6 + _C5) * r + _C4) * r + _C3) * r + _C2) * r + 1.0
    power = power * r + 1.0
    shift = (exponent.to(tl.int32) + _FRACTION_BITS) << 23
    return (power.to(tl.int32, bitcast=True) + shift).to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def cuts_of(top_k, top_p, slots, row, size):
    """(slot of the row's cuts, its k, its p, whether there is a top-k, whether there is a top-p)."""
    slot = tl.load(slots + row)
    is_row, slot = slot >= 0, tl.maximum(slot, 0)
    k, p = tl.load(top_k + slot), tl.load(top_p + slot)
    return slot, k, p, is_row & (k > 0) & (k < size), is_row & (p < 1.0)


@triton.jit
def sort_chunk(scores, first, images, lasts, masses, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Write the images of chunk `first` of all rows from the largest down; for each block its last image, and the
    chunk's mass up to there."""
    found = tl.sort(image_of(scores), descending=True)
    tl.store(images + first * CHUNK + tl.arange(0, CHUNK), found)
    blocks = tl.reshape(found, [BLOCK, BLOCK])
    mass = tl.sum(weights_of(score_of(blocks)), 1)
    block = first * BLOCK + tl.arange(0, BLOCK)
    tl.store(lasts + block, tl.min(blocks, 1))
    tl.store(masses + block, tl.cumsum(mass, 0))


@triton.jit
def _sort(scores, top_k, top_p, slots, images, lasts, masses, size, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, has_k, has_p = cuts_of(top_k, top_p, slots, row, size)
    if has_k | has_p:
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(scores + row * size + token_ids, mask=token_ids < size, other=float("-inf"))
        sort_chunk(values, row * tl.num_programs(1) + chunk, images, lasts, masses, BLOCK, CHUNK)


@triton.jit
def _above(bound, last, images, masses, chunk, is_chunk, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Number of a row's tokens with an image of at least `bound`, or their mass."""
    whole = tl.sum((last >= bound).to(tl.int32), 1)
    place = (chunk * BLOCK + whole)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_cut = is_chunk & (whole < BLOCK)
    block = tl.load(images + place, mask=is_cut[:, None], other=_BEHIND)
    if IS_MASS:
        before = tl.load(masses + chunk * BLOCK + whole - 1, mask=is_chunk & (whole > 0), other=0)
        return tl.sum(before, 0) + tl.sum(tl.sum(tl.where(block >= bound, weights_of(score_of(block)), 0), 1), 0)
    else:
        return tl.sum(whole * BLOCK + tl.sum((block >= bound).to(tl.int32), 1), 0).to(tl.int64)


@triton.jit
def _largest_reaching(target, last, images, masses, chunk, is_chunk, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest image for which `_above` reaches `target`. Images are counted from the lowest up, by their bits."""
    found = tl.full([], 0, tl.uint32)
    for step in range(32):
        tried = found | (tl.full([], 1, tl.uint32) << (31 - step))
        bound = (tried ^ 0x80000000).to(tl.int32, bitcast=True)
        reached = _above(bound, last, images, masses, chunk, is_chunk, IS_MASS, BLOCK)
        found = tl.where(reached >= target, tried, found)
    return (found ^ 0x80000000).to(tl.int32, bitcast=True)


@triton.jit
def _select(
    top_k, top_p, log_min_p, slots, images, lasts, masses, floors, size, num_chunks,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's threshold: the highest of those that its cuts set."""
    row = tl.program_id(0).to(tl.int64)
    slot, k, p, has_k, has_p = cuts_of(top_k, top_p, slots, row, size)
    floor = tl.where(tl.load(slots + row) >= 0, tl.load(log_min_p + slot).to(tl.float32), float("-inf"))
    if has_k | has_p:
        images += row * num_chunks * BLOCK * BLOCK
        masses += row * num_chunks * BLOCK
        chunk = tl.arange(0, CHUNKS)
        is_chunk = chunk < num_chunks
        places = chunk[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        last = tl.load(lasts + row * num_chunks * BLOCK + places, mask=is_chunk[:, None], other=_BEHIND)
        lowest = tl.full([], _BEHIND, tl.int32)
        if has_k:
            lowest = _largest_reaching(k, last, images, masses, chunk, is_chunk, False, BLOCK)
        if has_p:
            total = _above(lowest, last, images, masses, chunk, is_chunk, True, BLOCK)
            target = tl.minimum(tl.maximum(tl.ceil(p * total.to(tl.float64)).to(tl.int64), 1), total)
            lowest = _largest_reaching(target, last, images, masses, chunk, is_chunk, True, BLOCK)
        least = score_of(lowest)
        floor = tl.where(least > floor, least, floor)
    tl.store(floors + row, floor)


@triton.jit
def _cut(scores, floors, size, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    floor = tl.load(floors + row)
    if floor > float("-inf"):
        token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
        is_inside = token_ids < size
        values = tl.load(scores + row * size + token_ids, mask=is_inside, other=0.0)
        tl.store(scores + row * size + token_ids, tl.where(values < floor, float("-inf"), values), mask=is_inside)


class Chunks:
    """Sorted chunks of rows, and the launch that finds the rows' thresholds in them."""

    def __init__(self, num_rows: int, size: int, device: torch.device) -> None:
        self._size, self.num_chunks = size, triton.cdiv(size, _CHUNK)
        self.sorted = (
            torch.empty((num_rows, self.num_chunks, _CHUNK), dtype=torch.int32, device=device),
            torch.empty((num_rows, self.num_chunks, SORT_BLOCK), dtype=torch.int32, device=device),
            torch.empty((num_rows, self.num_chunks, SORT_BLOCK), dtype=torch.int64, device=device),
        )
        """(images, lasts, masses) of every chunk."""
        self.options: dict[str, Any] = {"BLOCK": SORT_BLOCK, "CHUNK": _CHUNK, "num_warps": SORT_WARPS, **UNFUSED}
        """Options of the launch that sorts, a program for each row and chunk."""

    def select(self, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, slots: Tensor, floors: Tensor) -> None:
        """Write each row's threshold to `floors` [rows] fp32; -inf if nothing is cut."""
        _select[(len(slots),)](
            top_k, top_p, log_min_p, slots, *self.sorted, floors, self._size, self.num_chunks,
            CHUNKS=triton.next_power_of_2(self.num_chunks), BLOCK=SORT_BLOCK, num_warps=_SELECT_WARPS, **UNFUSED,
        )  # fmt: skip


def top_k_top_p(scores: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, slots: Tensor | None) -> None:
    size = scores.shape[1]
    slots = torch.arange(len(scores), device=scores.device) if slots is None else slots.to(torch.int64).contiguous()
    chunks = Chunks(len(scores), size, scores.device)
    floors = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    programs = (len(scores), chunks.num_chunks)
    _sort[programs](scores, top_k, top_p, slots, *chunks.sorted, size, **chunks.options)
    chunks.select(top_k, top_p, log_min_p, slots, floors)
    _cut[programs](scores, floors, size, CHUNK=_CHUNK, num_warps=_CUT_WARPS)


def shipped() -> Iterator[Shipped]:
    types = {
        "scores": "*fp32", "top_k": "*i64", "top_p": "*fp64", "log_min_p": "*fp64", "slots": "*i64", "images": "*i32",
        "lasts": "*i32", "masses": "*i64", "floors": "*fp32", "size": "i32", "num_chunks": "i32",
    }  # fmt: skip
    yield _form("top_k_top_p_sort", "fp32", _sort, types, {"BLOCK": SORT_BLOCK, "CHUNK": _CHUNK}, SORT_WARPS)
    for chunks in (32, 64, 128, 256, 512):
        constants = {"CHUNKS": chunks, "BLOCK": SORT_BLOCK}
        yield _form("top_k_top_p_select", f"{chunks} chunks", _select, types, constants, _SELECT_WARPS)
    yield _form("top_k_top_p", "fp32", _cut, types, {"CHUNK": _CHUNK}, _CUT_WARPS)


def _form(
    op: str, config: str, kernel: Any, types: dict[str, str], constants: dict[str, int], num_warps: int
) -> Shipped:
    return Shipped(
        op=op,
        config=config,
        kernel=kernel,
        signature={name: types[name] for name in kernel.arg_names if name in types},
        constants=constants,
        num_warps=num_warps,
        is_streaming=kernel is not _select,
        multiples=("size",),
        options={} if kernel is _cut else UNFUSED,
    )
