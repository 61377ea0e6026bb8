"""Shares one step's attention out on a GPU: the work list, which the device makes itself.

A *unit* is a block of packed rows of one row of the step, with the tiles of `ATTENTION_SPLIT` keys that it sees. Packed
rows are queries x query heads of one KV head. The tiles of all units, in order, are cut into even *segments*, one for
each running program. A segment is some whole units, and at most one part of a unit at either end. All KV heads share
one list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import Shipped
from inferd.kernels.ops.paged_attention.batch import ATTENTION_SPLIT, AttentionBatch
from inferd.kernels.ops.paged_attention.passes import Pass

UNIT_FIELDS = 8
"""Fields of a unit, int32: row of the step, its first token, that token's position, the block's first packed row, the
row's number of packed rows, the first tile, tiles of all units before. One is unused: a unit fills a sector of 32
bytes."""
SEGMENT_FIELDS = 4
"""Fields of a border between segments, int32: tiles before it, the unit that contains or follows it, and the slot of
that unit's next tile if it lies inside; with parts, that of the part that begins there. One is unused."""
NO_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True)
class Work:
    """A launch and its list, shared by all layers of the step that see the same keys."""

    part: Pass
    units: Tensor = field(repr=False)
    """[num_units + 1, UNIT_FIELDS] int32. The last entry is the end: its tiles before are those of all units."""
    segments: Tensor = field(repr=False)
    """[num_segments + 1, SEGMENT_FIELDS] int32."""


def build(part: Pass, batch: AttentionBatch, group: int, window: int | None) -> Work:
    """Enqueue the computation of a launch's list, from the lengths on the device."""
    device = batch.seq_lens.device
    units = torch.empty(part.num_units + 1, UNIT_FIELDS, dtype=torch.int32, device=device)
    segments = torch.empty(part.num_segments + 1, SEGMENT_FIELDS, dtype=torch.int32, device=device)
    _share_out[(1,)](
        batch.query_start,
        batch.seq_lens,
        units,
        segments,
        batch.seq_lens.shape[0],
        group,
        NO_WINDOW if window is None else window,
        part.min_queries,
        part.max_queries,
        part.num_segments,
        part.num_slots,
        part.form.block_m,
        (part.num_units + 1).bit_length(),
        **_constants(part.num_segments, is_cut=part.is_cut, in_parts=part.is_in_parts and part.is_cut),
        num_warps=_NUM_WARPS,
    )
    return Work(part, units, segments)


_NUM_WARPS = 4
_ROWS, _CHUNK = 256, 512
"""Rows of the step, and units or borders, that are computed together."""


def _constants(num_segments: int, *, is_cut: bool, in_parts: bool) -> dict[str, object]:
    """Constants that do not depend on the number of rows, so that the prompts of a start compile all forms."""
    return {
        "ROWS": _ROWS,
        "BORDERS": max(64, triton.next_power_of_2(num_segments + 1)) if is_cut else _CHUNK,
        "CHUNK": _CHUNK,
        "TILE": ATTENTION_SPLIT,
        "IS_CUT": is_cut,
        "IN_PARTS": in_parts,
    }


_INTEGERS = (
    "num_rows",
    "group",
    "window",
    "min_queries",
    "max_queries",
    "num_segments",
    "num_slots",
    "block_m",
    "num_steps",
)


@triton.jit(do_not_specialize=_INTEGERS)
def _share_out(
    query_start,
    seq_lens,
    units,
    segments,
    num_rows,
    group,
    window,
    min_queries,
    max_queries,
    num_segments,
    num_slots,
    block_m,
    num_steps,
    ROWS: tl.constexpr,
    BORDERS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    IS_CUT: tl.constexpr,
    IN_PARTS: tl.constexpr,
):
    """One program, which reads back the memory that it writes: hence the barriers."""
    num_units = num_rows * 0
    for first_row in range(0, num_rows, ROWS):
        row = first_row + tl.arange(0, ROWS)
        is_row = row < num_rows
        first_token = tl.load(query_start + row, mask=is_row, other=0)
        queries = tl.load(query_start + row + 1, mask=is_row, other=0) - first_token
        first_position = tl.load(seq_lens + row, mask=is_row, other=0) - queries
        queries = tl.where((queries >= min_queries) & (queries <= max_queries), queries, 0)
        packed = queries * group
        blocks = (packed + block_m - 1) // block_m
        first_unit = num_units + tl.cumsum(blocks, 0) - blocks
        num_units += tl.sum(blocks, 0)
        for block in range(tl.max(blocks, 0)):
            is_unit = block < blocks
            first_packed = block * block_m
            first_seen = tl.maximum(first_position + first_packed // group - window + 1, 0)
            last_query = tl.minimum((first_packed + block_m - 1) // group, queries - 1)
            first_tile = first_seen // TILE
            place = units + (first_unit + block) * 8
            tl.store(place, row, mask=is_unit)
            tl.store(place + 1, first_token, mask=is_unit)
            tl.store(place + 2, first_position, mask=is_unit)
            tl.store(place + 3, first_packed + tl.zeros_like(row), mask=is_unit)
            tl.store(place + 4, packed, mask=is_unit)
            tl.store(place + 5, first_tile, mask=is_unit)
            tl.store(place + 6, (first_position + last_query) // TILE + 1 - first_tile, mask=is_unit)
    tl.debug_barrier()

    num_tiles = num_units * 0
    for first in range(0, num_units, CHUNK):
        unit = first + tl.arange(0, CHUNK)
        tiles = tl.load(units + unit * 8 + 6, mask=unit < num_units, other=0)
        tl.store(units + unit * 8 + 6, num_tiles + tl.cumsum(tiles, 0) - tiles, mask=unit < num_units)
        num_tiles += tl.sum(tiles, 0)
    tl.store(units + num_units * 8 + 6, num_tiles)
    tl.debug_barrier()

    if IS_CUT:
        border = tl.arange(0, BORDERS)
        cut = (tl.minimum(border, num_segments).to(tl.int64) * num_tiles // num_segments).to(tl.int32)
        unit = _unit_at(cut, units, num_units, num_steps)
        before = (tl.maximum(tl.minimum(border, num_segments) - 1, 0).to(tl.int64) * num_tiles // num_segments).to(
            tl.int32
        )
        start = tl.load(units + unit * 8 + 6)
        is_first_cut = (cut > start) & (before <= start)
        if IN_PARTS:
            # A slot for the part that begins here, and at a unit's first cut one for the part before it.
            slots = tl.where((cut > start) & (cut > before), 1, 0) + tl.where(is_first_cut, 1, 0)
            slot = tl.cumsum(slots, 0) - 1
        else:
            left = tl.load(units + tl.minimum(unit + 1, num_units) * 8 + 6) - cut
            slots = tl.where(is_first_cut, left + 1, 0)
            slot = tl.cumsum(slots, 0) - left
        # If the partial results would not fit, every border moves to its unit's start.
        cut = tl.where(tl.sum(slots, 0) > num_slots, start, cut)
        place = segments + border * 4
        is_border = border <= num_segments
        tl.store(place, cut, mask=is_border)
        tl.store(place + 1, unit, mask=is_border)
        tl.store(place + 2, slot, mask=is_border)
    else:
        for first in range(0, num_segments + 1, CHUNK):
            border = first + tl.arange(0, CHUNK)
            unit = tl.minimum(border, num_units)
            place = segments + border * 4
            is_border = border <= num_segments
            tl.store(place, tl.load(units + unit * 8 + 6), mask=is_border)
            tl.store(place + 1, unit, mask=is_border)
            tl.store(place + 2, tl.zeros_like(unit), mask=is_border)


@triton.jit
def _unit_at(cut, units, num_units, num_steps):
    """The last unit that starts at or before each position, found by bits of its index: every unit has tiles."""
    unit = tl.zeros_like(cut)
    for step in range(num_steps):
        further = unit + (1 << (num_steps - 1 - step))
        is_inside = further <= num_units
        start = tl.load(units + tl.minimum(further, num_units) * 8 + 6, mask=is_inside, other=0)
        unit = tl.where(is_inside & (start <= cut), further, unit)
    return unit


def shipped() -> Iterator[Shipped]:
    for num_segments in (33, 264):
        for in_parts in (False, True):
            kind = f"at most {num_segments} segments{' in parts' if in_parts else ''}"
            yield _shipped(num_segments, kind, is_cut=True, in_parts=in_parts)
    yield _shipped(1024, "units", is_cut=False, in_parts=False)


def _shipped(num_segments: int, config: str, *, is_cut: bool, in_parts: bool) -> Shipped:
    return Shipped(
        op="attention_work",
        config=config,
        kernel=_share_out,
        signature={
            **dict.fromkeys(("query_start", "seq_lens", "units", "segments"), "*i32"),
            **dict.fromkeys(_INTEGERS, "i32"),
        },
        constants=_constants(num_segments, is_cut=is_cut, in_parts=in_parts),
        num_warps=_NUM_WARPS,
    )
