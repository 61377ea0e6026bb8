"""Launch parameters of the Triton kernel: the launches of a step, the form of each, and the work that they share out.

Pure functions of data that the host knows before a step: shapes, the device, and the most queries of each row. They
know no lengths, so a row's length may be known to the device alone. Grids and buffers are large enough for all lengths,
so a CUDA graph serves every step of its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferd.kernels.paged_attention.batch import ATTENTION_SPLIT

BLOCKS = (16, 32, 64, 128)
"""Packed rows in a block: queries times query heads of one KV head."""
STEADY_ROWS = 32
"""Most packed rows in a block if bits must not depend on the block. Blocks of 16 and 32 multiply by the same
instruction on every architecture. Larger ones use those of warp groups on Hopper and later, which may round
differently."""
SLOT_BYTES = 256 << 20
"""Most memory for the partial results of cut units. If they need more, units are not cut."""
MAX_QUERIES = (1 << 31) - 1

_FEW_ROWS = 64
"""Most packed rows of a row that is still bound by reading its KV, so that it shares a launch with decodes."""
_WAVES = 4
"""Blocks for each program from which the hardware spreads uncut units evenly enough."""


@dataclass(frozen=True, slots=True)
class Form:
    """Parameters of the attention kernel that change its code."""

    block_m: int
    """Packed rows of a block."""
    block_n: int
    """Keys multiplied together. Depends on the head's size alone, because it sets the order of sums within a tile."""
    num_warps: int
    num_stages: int
    programs_per_sm: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters shared by all steps of a model's layers of one kind."""

    num_kv_heads: int
    group: int
    """Query heads of a KV head."""
    head_dim: int
    kv_bytes: int
    """Bytes of a number in the pool."""
    window: int | None
    num_sms: int
    sm: int
    """Compute capability: 10 * major + minor."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One launch, for the rows of the step that have between `min_queries` and `max_queries` queries."""

    form: Form
    min_queries: int
    max_queries: int
    num_units: int
    """Most units of the launch."""
    num_segments: int
    """Programs for each KV head."""
    is_cut: bool
    """Whether segments are even parts of the work; else each is one unit."""
    num_slots: int
    """Partial results for each KV head; 0 if no unit can be cut."""
    slot_rows: int


def form(head_dim: int, kv_bytes: int, block_m: int) -> Form:
    """The form for `block_m` packed rows, one of `BLOCKS`.

    With small blocks, a multiprocessor keeps 64 to 128 KiB of K and V on their way. Enough warps, and few enough stages
    in large blocks, avoid spills.
    """
    is_small = head_dim <= 64
    block_n = 32 if head_dim > 128 else 64
    if block_m > STEADY_ROWS:
        num_stages = 2 if kv_bytes == 1 and head_dim <= 128 else 3
        return Form(block_m, block_n, num_warps=8, num_stages=num_stages, programs_per_sm=1)
    if kv_bytes == 1:
        num_stages = 3 if head_dim > 128 and block_m == 32 else 6
        return Form(block_m, block_n, num_warps=8, num_stages=num_stages, programs_per_sm=1)
    if block_m == 16:
        return Form(block_m, block_n, num_warps=4, num_stages=3, programs_per_sm=3 if is_small else 2)
    return Form(block_m, block_n, num_warps=8, num_stages=6 if is_small else 4, programs_per_sm=1)


def largest_block(head_dim: int, kv_bytes: int, sm: int, *, is_cut: bool) -> int:
    """The largest block whose results fit in registers twice: for a tile and for the tiles before it. From sm 90 on
    larger blocks read their operands from shared memory. Storing a result at a cut needs more registers, and so does
    dequantizing K and V."""
    is_large = sm >= 90 and not is_cut and kv_bytes > 1
    if head_dim > 128:
        return 64 if is_large else 32
    return 128 if is_large else 64


def passes(shape: Shape, query_lens: Sequence[int], table_tokens: int, *, is_deterministic: bool) -> tuple[Pass, ...]:
    """The launches of a step whose rows have at most `query_lens` queries and `table_tokens` keys. If bits must not
    depend on how a prompt was chunked, all rows share one kind of launch; else long chunks have another."""
    if is_deterministic:
        return (_cut(shape, query_lens, (1, MAX_QUERIES), STEADY_ROWS, table_tokens),)
    border = _FEW_ROWS // shape.group
    most = largest_block(shape.head_dim, shape.kv_bytes, shape.sm, is_cut=True)
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
    """A launch with even segments, as many as programs run at once."""
    chosen = _fitting(shape, lens, most_rows)
    num_units, num_programs = _num_units(shape, lens, chosen), _num_programs(shape, chosen)
    slot_rows = min(chosen.block_m, max(lens) * shape.group)
    tiles = _most_tiles(table_tokens, shape.window, -(-chosen.block_m // shape.group) + 1)
    budget = SLOT_BYTES // (shape.num_kv_heads * slot_rows * (shape.head_dim + 2) * 4)
    num_slots = min(min(num_units, num_programs - 1) * tiles, budget) if tiles > 1 else 0
    return Pass(chosen, *bounds, num_units, num_programs, is_cut=True, num_slots=num_slots, slot_rows=slot_rows)


def _whole(shape: Shape, lens: Sequence[int], bounds: tuple[int, int]) -> Pass | None:
    """A launch with a segment for each unit; None if that would leave multiprocessors idle."""
    chosen = _fitting(shape, lens, largest_block(shape.head_dim, shape.kv_bytes, shape.sm, is_cut=False))
    num_units = _num_units(shape, lens, chosen)
    if num_units < _WAVES * _num_programs(shape, chosen):
        return None
    return Pass(chosen, *bounds, num_units, num_units, is_cut=False, num_slots=0, slot_rows=chosen.block_m)


def _fitting(shape: Shape, lens: Sequence[int], most_rows: int) -> Form:
    """The form whose blocks hold the longest row's queries, up to `most_rows`."""
    rows = max(lens) * shape.group
    block_m = next((block for block in BLOCKS if block >= min(rows, most_rows)), most_rows)
    return form(shape.head_dim, shape.kv_bytes, block_m)


def _num_units(shape: Shape, lens: Sequence[int], chosen: Form) -> int:
    return sum(-(-length * shape.group // chosen.block_m) for length in lens)


def _num_programs(shape: Shape, chosen: Form) -> int:
    """Programs that run at once, for each KV head."""
    return max(1, shape.num_sms * chosen.programs_per_sm // shape.num_kv_heads)


def _most_tiles(table_tokens: int, window: int | None, num_queries: int) -> int:
    """Most tiles that a unit of so many queries sees."""
    tiles = -(-table_tokens // ATTENTION_SPLIT)
    if window is None:
        return tiles
    return min(tiles, (window + num_queries - 1 + ATTENTION_SPLIT - 2) // ATTENTION_SPLIT + 1)
