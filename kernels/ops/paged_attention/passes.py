"""Launch parameters of the Triton kernel: the launches of a step, the form of each, and the work that they share out.

Pure functions of data that the host knows before a step: shapes, the device, and the most queries of each row. They
know no lengths, so a row's length may be known to the device alone. Grids and buffers are large enough for all lengths,
so a CUDA graph serves every step of its shape.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inferd.kernels.device import RESERVED_BYTES, Candidate, DeviceProperties, SharedNeed, fit
from inferd.kernels.ops.paged_attention.batch import ATTENTION_SPLIT

BLOCKS = (16, 32, 64, 128)
"""Packed rows in a block: queries times query heads of one KV head."""
STEADY_ROWS = 32
"""Most packed rows in a block if bits must not depend on the block. Blocks of 16 and 32 multiply by the same
instruction on every architecture. Larger ones use those of warp groups on Hopper and later, which may round
differently."""
SLOT_BYTES = 256 << 20
"""Most memory for the partial results of cut units. If they need more, units are not cut."""
MAX_QUERIES = (1 << 31) - 1
PARTS_MIN_SM = 90
"""The first architecture for which the kernel of `parts.py` was compiled and judged."""

_EXCHANGED_BYTES, _KEPT_BYTES = 32 << 10, 1 << 10
"""Most bytes of results that threads exchange at once before they merge or store them, and most bytes beside all that
is named, in all compiled forms."""

FEW_ROWS = 64
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

    @property
    def max_registers(self) -> int:
        """Registers of a thread if `programs_per_sm` programs fill a multiprocessor. The assembler might aim at more
        programs, and spill."""
        return min(255, 65536 // (32 * self.num_warps * self.programs_per_sm) // 8 * 8)


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
    device: DeviceProperties
    is_fp8_in_parts: bool = False
    """Whether `parts_fp8.py` takes what the host knows of K, V and queries."""


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
    is_in_parts: bool
    """Whether `parts.py` computes it. Then a cut unit has a partial result for each part, else for each tile behind
    its first part."""


def shared_need(form: Form, head_dim: int, kv_bytes: int) -> SharedNeed:
    """Shared memory of each of the three kernels. The loop copies blocks of K and V. Of 8 bits it copies one of both,
    and both in 16 bits take memory too. Beside these it keeps queries, and has threads exchange weights and results.
    """
    size = max(16, 1 << (head_dim - 1).bit_length())
    queries = 2 * form.block_m * size
    # A warp that has all keys of its 16 rows has their weights too.
    weights = 2 * form.block_m * form.block_n if form.block_m < 16 * form.num_warps else 0
    kept = _KEPT_BYTES + max(queries + weights, min(queries + 4 * form.block_m * size, _EXCHANGED_BYTES))
    heads = form.block_n * size
    step, kept = (heads, kept + 2 * heads) if kv_bytes == 1 else (2 * kv_bytes * heads, kept)
    return SharedNeed(step, kept, step if form.block_m > STEADY_ROWS else 0)


@functools.cache
def fitted(forms: tuple[Form, ...], head_dim: int, kv_bytes: int, device: DeviceProperties) -> Form:
    """The first form that fits the device, with as many of its stages as fit. All have the same blocks of keys, which
    set the order of sums. Raises `DoesNotFitError` if none fits."""

    def candidate(form: Form) -> Candidate[Form]:
        name = f"attention {form.block_m} x {form.block_n} of {head_dim} in {8 * kv_bytes} bits"
        return Candidate(name, form, form.num_stages, shared_need(form, head_dim, kv_bytes))

    form, num_stages = fit(device, map(candidate, forms))
    return replace(form, num_stages=num_stages)


def form(head_dim: int, kv_bytes: int, block_m: int) -> Form:
    """The form for `block_m` packed rows, one of `BLOCKS`, on a device with enough memory.

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


def part_form(head_dim: int, block_m: int, kv_bytes: int) -> Form:
    """The form of `parts.py` for `block_m` packed rows, or of `parts_fp8.py` for one of up to `STEADY_ROWS`."""
    if kv_bytes == 1:
        if block_m == 32 and head_dim > 64:
            return Form(block_m, 32 if head_dim > 128 else 64, num_warps=8, num_stages=4, programs_per_sm=1)
        programs = 3 if head_dim <= 64 and block_m == 16 else 2
        return Form(block_m, 32 if head_dim > 128 else 64, num_warps=4, num_stages=4, programs_per_sm=programs)
    if block_m <= STEADY_ROWS:
        return form(head_dim, 2, block_m)
    if head_dim > 128:
        return Form(block_m, 32, num_warps=8, num_stages=3, programs_per_sm=1)
    if block_m == 64:
        # One warp group: two would compute the same scores. Keys in blocks of 64 spill on sm_100.
        return Form(block_m, 32, num_warps=4, num_stages=3, programs_per_sm=2)
    return Form(block_m, 64, num_warps=8, num_stages=3, programs_per_sm=1)


def largest_block(head_dim: int) -> int:
    """The largest block whose results fit in registers twice: for a tile and for the tiles before it."""
    return 32 if head_dim > 128 else 64


def largest_whole(head_dim: int) -> int:
    """The largest block of `parts.py`, which has its results in registers once."""
    return 64 if head_dim > 128 else 128


def refuses_parts(device: DeviceProperties, kv_bytes: int, *, is_deterministic: bool) -> str | None:
    """Why `parts.py` does not compute a step's attention; None if it does."""
    if is_deterministic:
        return "adds up a sequence's keys in an order that depends on the step's other rows"
    if kv_bytes == 1:
        return "takes K and V in 16 bits"
    if device.sm < PARTS_MIN_SM:
        return f"needs compute capability {PARTS_MIN_SM / 10}; this GPU has {device.capability}"
    if not device.is_known:
        return f"was not compiled for compute capability {device.capability}"
    return None


def passes(
    shape: Shape, query_lens: Sequence[int], table_tokens: int, *, is_deterministic: bool, knows_lens: bool = True
) -> tuple[Pass, ...]:
    """The launches of a step whose rows have at most `query_lens` queries and `table_tokens` keys. If bits must not
    depend on how a prompt was chunked, all rows share one kind of launch; else long chunks have another.

    Without `knows_lens`, the sum of `query_lens` bounds the queries of all rows, and only the device knows those of
    each. Then there are launches for rows of both kinds. Each is as large as a step of such rows alone needs, and the
    device leaves out the rows of the other kind."""
    if is_deterministic or not shape.device.is_known:
        # Blocks of so few rows are multiplied by the same instruction everywhere, so they are the safest, too.
        forms = _forms(shape, STEADY_ROWS, in_parts=False)
        return (_cut(shape, forms, query_lens, (1, MAX_QUERIES), table_tokens),)
    in_parts = refuses_parts(shape.device, shape.kv_bytes, is_deterministic=False) is None
    border = FEW_ROWS // shape.group
    forms = _forms(shape, FEW_ROWS if in_parts else largest_block(shape.head_dim), in_parts=in_parts)
    few, long = _sides(query_lens, border) if knows_lens else _most_of_sides(query_lens, border)
    found = []
    if few:
        is_fp8 = shape.is_fp8_in_parts and refuses_parts(shape.device, 2, is_deterministic=False) is None
        of_few = _forms(shape, STEADY_ROWS, in_parts=True) if is_fp8 else forms
        found.append(_cut(shape, of_few, few, (1, border), table_tokens))
    if long:
        bounds = (border + 1, MAX_QUERIES)
        most = largest_whole(shape.head_dim) if in_parts else largest_block(shape.head_dim)
        # Whether whole units would fill the device depends on the rows' own lengths.
        whole = _whole(shape, _forms(shape, most, in_parts=in_parts), long, bounds) if knows_lens else None
        found.append(whole or _cut(shape, forms, long, bounds, table_tokens))
    return tuple(found)


def _sides(query_lens: Sequence[int], border: int) -> tuple[list[int], list[int]]:
    """The rows with at most `border` queries, and the others."""
    few = [length for length in query_lens if length <= border]
    return few, [length for length in query_lens if length > border]


def _most_of_sides(query_lens: Sequence[int], border: int) -> tuple[list[int], list[int]]:
    """Numbers of queries for which as many blocks must be launched as for any rows of at most `border` queries, and for
    any others, or more."""
    num_tokens = sum(query_lens)
    num_long = min(len(query_lens), num_tokens // (border + 1))
    few = [border] * len(query_lens) if border else []
    # All but the last block of each row are full.
    return few, [num_tokens] + [1] * num_long if num_long else []


@dataclass(frozen=True, slots=True)
class _Forms:
    """The forms of one of the two kernels, by packed rows in a block."""

    by_rows: tuple[Form, ...]
    is_in_parts: bool

    def fitting(self, rows: int, shape: Shape) -> Form:
        """The smallest form with `rows` packed rows in a block, else the largest; or the next smaller one that fits the
        device."""
        most = next((index for index, form in enumerate(self.by_rows) if form.block_m >= rows), len(self.by_rows) - 1)
        return fitted(self.by_rows[most::-1], shape.head_dim, shape.kv_bytes, shape.device)


def _forms(shape: Shape, most_rows: int, *, in_parts: bool) -> _Forms:
    blocks = [block for block in BLOCKS if block <= most_rows]
    if in_parts:
        return _Forms(tuple(part_form(shape.head_dim, block, shape.kv_bytes) for block in blocks), is_in_parts=True)
    return _Forms(tuple(form(shape.head_dim, shape.kv_bytes, block) for block in blocks), is_in_parts=False)


def _cut(shape: Shape, forms: _Forms, lens: Sequence[int], bounds: tuple[int, int], table_tokens: int) -> Pass:
    """A launch with even segments, as many as programs run at once."""
    chosen = forms.fitting(max(lens) * shape.group, shape)
    num_units, num_programs = _num_units(shape, lens, chosen), _num_programs(shape, chosen)
    slot_rows = min(chosen.block_m, max(lens) * shape.group)
    tiles = _most_tiles(table_tokens, shape.window, -(-chosen.block_m // shape.group) + 1)
    budget = _num_fitting(shape, slot_rows)
    # A border ends one part and begins another.
    most = 2 * (num_programs - 1) if forms.is_in_parts else min(num_units, num_programs - 1) * tiles
    return Pass(
        chosen,
        *bounds,
        num_units,
        num_programs,
        is_cut=True,
        num_slots=min(most, budget) if tiles > 1 else 0,
        slot_rows=slot_rows,
        is_in_parts=forms.is_in_parts,
    )


def _num_fitting(shape: Shape, slot_rows: int) -> int:
    """Partial results for each KV head that `SLOT_BYTES` hold."""
    return SLOT_BYTES // (shape.num_kv_heads * slot_rows * (shape.head_dim + 2) * 4)


def most_cut(shape: Shape, num_tokens: int) -> int | None:
    """Most blocks of `STEADY_ROWS` packed rows that are cut in any step if each sees `num_tokens` keys, and bits must
    not depend on cuts. None if half as many as programs run at once are: more blocks keep the programs busy uncut."""
    chosen = _forms(shape, STEADY_ROWS, in_parts=False).fitting(STEADY_ROWS, shape)
    tiles = _most_tiles(num_tokens, shape.window, -(-chosen.block_m // shape.group) + 1)
    found = _num_fitting(shape, chosen.block_m) // tiles
    return found if 2 * found < _num_programs(shape, chosen) else None


def _whole(shape: Shape, forms: _Forms, lens: Sequence[int], bounds: tuple[int, int]) -> Pass | None:
    """A launch with a segment for each unit; None if that would leave multiprocessors idle."""
    chosen = forms.fitting(max(lens) * shape.group, shape)
    num_units = _num_units(shape, lens, chosen)
    if num_units < _WAVES * _num_programs(shape, chosen):
        return None
    return Pass(
        chosen,
        *bounds,
        num_units,
        num_units,
        is_cut=False,
        num_slots=0,
        slot_rows=chosen.block_m,
        is_in_parts=forms.is_in_parts,
    )


def _num_units(shape: Shape, lens: Sequence[int], chosen: Form) -> int:
    return sum(-(-length * shape.group // chosen.block_m) for length in lens)


def _num_programs(shape: Shape, chosen: Form) -> int:
    """Programs that run at once, for each KV head: as many as the registers and the shared memory of the
    multiprocessors have space for."""
    device, each = shape.device, chosen.programs_per_sm
    if device.multiprocessor_bytes is not None:
        need = shared_need(chosen, shape.head_dim, shape.kv_bytes).of(chosen.num_stages, device)
        each = min(each, device.multiprocessor_bytes // (need + RESERVED_BYTES))
    return max(1, device.num_multiprocessors * each // shape.num_kv_heads)


def _most_tiles(table_tokens: int, window: int | None, num_queries: int) -> int:
    """Most tiles that a unit of so many queries sees."""
    tiles = -(-table_tokens // ATTENTION_SPLIT)
    if window is None:
        return tiles
    return min(tiles, (window + num_queries - 1 + ATTENTION_SPLIT - 2) // ATTENTION_SPLIT + 1)
