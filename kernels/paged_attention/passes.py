"""Launch parameters of the Triton kernel: how many launches a step takes, of which form, and how much they share out.

Pure functions of what the host knows before a step: shapes, the device, and how many queries each row has at most. They
know no lengths: grids and buffers have sizes that hold for all of them, so a CUDA graph holds for every step of its
shape, and a row's length may be known to the device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferd.kernels.paged_attention.batch import ATTENTION_SPLIT

BLOCKS = (16, 32, 64, 128)
"""Packed rows in a block: queries times query heads of one KV head."""
STEADY_ROWS = 32
"""Most packed rows in a block where bits may not depend on the block. Blocks of 16 and 32 multiply by one instruction
on every architecture; larger ones, on Hopper and later, by those of warp groups, which need not round alike."""
SLOT_BYTES = 256 << 20
"""Most memory for the partial results of units that are cut. Where they need more, units are left whole."""
MAX_QUERIES = (1 << 31) - 1

_FEW_ROWS = 64
"""Most packed rows of a row of the step that is still bound by reading its KV: it shares a launch with decodes."""
_WAVES = 4
"""Blocks for each program from which the hardware spreads whole units evenly enough."""


@dataclass(frozen=True, slots=True)
class Form:
    """Parameters of the attention kernel that change its code."""

    block_m: int
    """Packed rows."""
    block_n: int
    """Keys multiplied together: by the head's size alone, because the order of sums within a tile depends on it."""
    num_warps: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What all steps of a model's layers of one kind have in common."""

    num_kv_heads: int
    group: int
    """Query heads of a KV head."""
    head_dim: int
    kv_bytes: int
    """Of a number in the pool."""
    window: int | None
    num_sms: int
    sm: int
    """Compute capability: 10 * major + minor."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One launch, for those rows of the step that have between `min_queries` and `max_queries` queries."""

    form: Form
    min_queries: int
    max_queries: int
    num_units: int
    """At most."""
    num_segments: int
    """Programs for each KV head."""
    is_cut: bool
    """Whether segments are even, or a unit each."""
    num_slots: int
    """Partial results for each KV head; 0 where no unit can be cut."""
    slot_rows: int


def form(head_dim: int, kv_bytes: int, block_m: int) -> Form:
    """Of `block_m` packed rows in `BLOCKS`.

    What runs on a multiprocessor keeps 64 to 128 KiB of K and V on their way, where blocks are small; warps are as
    many, and stages in large blocks as few, as it takes for nothing to spill.
    """
    is_small = head_dim <= 64
    block_n = 32 if head_dim > 128 else 64
    if block_m > STEADY_ROWS:
        num_stages = 2 if kv_bytes == 1 and head_dim <= 128 else 3
        return Form(block_m, block_n, num_warps=8, num_stages=num_stages, programs_per_sm=1)
    if kv_bytes == 1:
        return Form(block_m, block_n, num_warps=8, num_stages=6, programs_per_sm=1)
    if block_m == 16:
        return Form(block_m, block_n, num_warps=4, num_stages=3, programs_per_sm=3 if is_small else 2)
    return Form(block_m, block_n, num_warps=8, num_stages=6 if is_small else 4, programs_per_sm=1)


def largest_block(head_dim: int, sm: int, *, is_cut: bool) -> int:
    """What registers hold twice, for a tile and for the tiles before it. From sm 90 on larger blocks take their
    operands from shared memory; what is stored at a cut takes registers of its own."""
    if head_dim > 128:
        return 64 if sm >= 90 and not is_cut else 32
    return 128 if sm >= 90 and not is_cut else 64


def passes(shape: Shape, query_lens: Sequence[int], table_tokens: int, *, is_deterministic: bool) -> tuple[Pass, ...]:
    """The launches of a step whose rows have at most `query_lens` queries and `table_tokens` keys. Where bits may not
    depend on how a prompt was chunked, all rows go one way; else long chunks go another."""
    if is_deterministic:
        return (_cut(shape, query_lens, (1, MAX_QUERIES), STEADY_ROWS, table_tokens),)
    border = _FEW_ROWS // shape.group
    most = largest_block(shape.head_dim, shape.sm, is_cut=True)
    found = []
    few = [length for length in query_lens if length <= border]
    if few:
        found.append(_cut(shape, few, (1, border), most, table_tokens))
    long = [length for length in query_lens if length > border]
    if long:
        bounds = (border + 1, MAX_QUERIES)
        found.append(_whole(shape, long, bounds) or _cut(shape, long, bounds, most, table_tokens))
    return tuple(found)


def _cut(shape: Shape, lens: Sequence[int], bounds: tuple[int, int], most_rows: int, table_tokens: int) -> Pass:
    """Even segments, as many as programs run at once."""
    chosen = _fitting(shape, lens, most_rows)
    num_units, num_programs = _num_units(shape, lens, chosen), _num_programs(shape, chosen)
    slot_rows = min(chosen.block_m, max(lens) * shape.group)
    tiles = _most_tiles(table_tokens, shape.window, -(-chosen.block_m // shape.group) + 1)
    budget = SLOT_BYTES // (shape.num_kv_heads * slot_rows * (shape.head_dim + 2) * 4)
    num_slots = min(min(num_units, num_programs - 1) * tiles, budget) if tiles > 1 else 0
    return Pass(chosen, *bounds, num_units, num_programs, is_cut=True, num_slots=num_slots, slot_rows=slot_rows)


def _whole(shape: Shape, lens: Sequence[int], bounds: tuple[int, int]) -> Pass | None:
    """A segment for each unit; None where they would leave multiprocessors idle."""
    chosen = _fitting(shape, lens, largest_block(shape.head_dim, shape.sm, is_cut=False))
    num_units = _num_units(shape, lens, chosen)
    if num_units < _WAVES * _num_programs(shape, chosen):
        return None
    return Pass(chosen, *bounds, num_units, num_units, is_cut=False, num_slots=0, slot_rows=chosen.block_m)


def _fitting(shape: Shape, lens: Sequence[int], most_rows: int) -> Form:
    """With blocks that hold the longest row's queries, up to `most_rows`."""
    rows = max(lens) * shape.group
    block_m = next((block for block in BLOCKS if block >= min(rows, most_rows)), most_rows)
    return form(shape.head_dim, shape.kv_bytes, block_m)


def _num_units(shape: Shape, lens: Sequence[int], chosen: Form) -> int:
    return sum(-(-length * shape.group // chosen.block_m) for length in lens)


def _num_programs(shape: Shape, chosen: Form) -> int:
    """For each KV head, of those that run at once."""
    return max(1, shape.num_sms * chosen.programs_per_sm // shape.num_kv_heads)


def _most_tiles(table_tokens: int, window: int | None, num_queries: int) -> int:
    """That a unit of so many queries sees."""
    tiles = -(-table_tokens // ATTENTION_SPLIT)
    if window is None:
        return tiles
    return min(tiles, (window + num_queries - 1 + ATTENTION_SPLIT - 2) // ATTENTION_SPLIT + 1)
