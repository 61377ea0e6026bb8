"""The Triton kernel of paged attention: how it shares out its work, on which no bit of a result depends.

It runs in Triton's interpreter, by default with tiles of 64 keys: everything that tiles do happens at a quarter of the
length.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.device import DeviceProperties
from inferd.kernels.ops.paged_attention import PAGED_ATTENTION, AttentionBatch, paged_attention
from tests.kernels import interpreter
from tests.kernels.conftest import is_on_gpu
from tests.kernels.test_paged_attention import FP8, INT8, Sequences, dense, sinks_of

pytest.importorskip("triton")

from inferd.kernels.ops.paged_attention import partial, passes, tiles, work
from inferd.kernels.ops.paged_attention import parts as in_parts_kernel
from inferd.kernels.ops.paged_attention import triton as kernel
from inferd.kernels.ops.paged_attention.split import ATTENTION_SPLIT_KERNEL, Key

TILE = 64
SCALE = 0.2
ROWS = ((0, 1), (300, 1), (0, 35), (TILE - 1, 1), (TILE, 1), (180, 13), (130, 4), (5, 2))


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gpu.interpret(True)
    interpreter.repair()
    PAGED_ATTENTION.force("triton")
    set_tile(monkeypatch, TILE)
    yield
    gpu.interpret(False)
    PAGED_ATTENTION.force(None)


def set_tile(monkeypatch: pytest.MonkeyPatch, num_keys: int) -> None:
    for module in (passes, work, tiles, in_parts_kernel):
        monkeypatch.setattr(module, "ATTENTION_SPLIT", num_keys)


def set_device(monkeypatch: pytest.MonkeyPatch, num_sms: int, sm: int = 90) -> None:
    monkeypatch.setattr(gpu, "properties_of", lambda *_: DeviceProperties.of(sm, num_sms))


# -- launches ----------------------------------------------------------------------------------------------------------


SHAPE = passes.Shape(
    num_kv_heads=8, group=4, head_dim=128, kv_bytes=2, window=None, device=DeviceProperties.of(90, 132)
)


def launches(
    query_lens: Sequence[int],
    *,
    is_deterministic: bool = False,
    knows_lens: bool = True,
    sm: int = 90,
    **changed: int,
) -> list[tuple[int, bool]]:
    """(packed rows in a block, whether units are cut) of each launch."""
    shape = dataclasses.replace(SHAPE, device=DeviceProperties.of(sm, 132), **changed)
    found = passes.passes(shape, query_lens, 8192, is_deterministic=is_deterministic, knows_lens=knows_lens)
    return [(part.form.block_m, part.is_cut) for part in found]


def test_blocks_fit_the_queries() -> None:
    assert launches([1] * 64) == [(16, True)]
    assert launches([1] * 64, group=32) == [(32, True)]
    assert launches([5] * 64) == [(32, True)]
    assert launches([8] * 64, group=8) == [(64, True)]
    assert launches([8] * 64, group=8, head_dim=256) == [(64, True)]
    assert launches([8] * 64, group=8, head_dim=256, sm=80) == [(32, True)]
    assert launches([8] * 64, group=8, is_deterministic=True) == [(32, True)]
    assert launches([1] * 64, group=71, num_kv_heads=1) == [(64, True)], "a lone query of many heads"


def test_long_chunks_go_another_way_unless_bits_may_not_depend_on_chunks() -> None:
    assert launches([1] * 64 + [2048]) == [(16, True), (128, False)]
    assert launches([1] * 64 + [2048], is_deterministic=True) == [(32, True)]
    assert launches([2048]) == [(128, False)]
    assert launches([100]) == [(64, True)], "too few blocks for the device are cut"
    assert launches([2048], sm=80) == [(64, False)]
    assert launches([2048], head_dim=256) == [(64, False)]
    assert launches([2048], head_dim=256, sm=80) == [(32, False)]
    assert launches([1] * 64 + [2048], sm=103) == [(32, True)], "what no table knows gets the safest form"


def test_parts_are_for_steps_that_need_not_be_deterministic() -> None:
    assert all(part.is_in_parts for part in passes.passes(SHAPE, [1, 2048], 8192, is_deterministic=False))
    for changed, is_deterministic, reason in (
        ({}, True, "adds up a sequence's keys in an order that depends on the step's other rows"),
        ({"device": DeviceProperties.of(89, 132)}, False, "needs compute capability 9.0; this GPU has 8.9"),
        ({"device": DeviceProperties.of(103, 132)}, False, "was not compiled for compute capability 10.3"),
        ({"kv_bytes": 1}, False, "takes K and V in 16 bits"),
    ):
        shape = dataclasses.replace(SHAPE, **changed)  # type: ignore[arg-type]
        assert passes.refuses_parts(shape.device, shape.kv_bytes, is_deterministic=is_deterministic) == reason
        found = passes.passes(shape, [1, 2048], 8192, is_deterministic=is_deterministic)
        assert not any(part.is_in_parts for part in found)
    ampere = DeviceProperties.of(80, 108)
    key = Key("cuda", torch.bfloat16, torch.bfloat16, 128, False, False, SHAPE.device, is_invariant=False)
    assert ATTENTION_SPLIT_KERNEL.choice(key).chosen == "triton_parts"
    fp8 = key._replace(kv_dtype=FP8)
    assert ATTENTION_SPLIT_KERNEL.choice(fp8).chosen == "triton_parts_fp8"
    for other in (key._replace(is_invariant=True), key._replace(device=ampere), key._replace(kv_dtype=INT8)):
        assert ATTENTION_SPLIT_KERNEL.choice(other).chosen == "tiles"
    for changed in (
        {"is_chunk": True},
        {"has_softcap": True},
        {"head_dim": 96},
        {"device": ampere},
        {"is_invariant": True},
    ):
        assert ATTENTION_SPLIT_KERNEL.choice(fp8._replace(**changed)).chosen == "tiles"  # type: ignore[arg-type]


def test_e4m3_is_in_parts_for_decodes_and_drafts_alone() -> None:
    shape = dataclasses.replace(SHAPE, kv_bytes=1, is_fp8_in_parts=True)
    for lens, rows in (([1] * 64, 16), ([8] * 64, 32)):
        (part,) = passes.passes(shape, lens, 8192, is_deterministic=False)
        assert part.is_in_parts and part.form.block_m == rows
    few, chunk = passes.passes(shape, [1, 2048], 8192, is_deterministic=False)
    assert few.is_in_parts and not chunk.is_in_parts
    for sm, is_deterministic in ((89, False), (90, True)):
        other = dataclasses.replace(shape, device=DeviceProperties.of(sm, 132))
        assert not any(part.is_in_parts for part in passes.passes(other, [1], 8192, is_deterministic=is_deterministic))


def test_keys_are_multiplied_in_the_same_blocks_whatever_the_rows() -> None:
    for head_dim, kv_bytes in itertools.product((64, 80, 96, 128, 256), (1, 2)):
        forms = [passes.form(head_dim, kv_bytes, block_m) for block_m in passes.BLOCKS]
        assert len({form.block_n for form in forms}) == 1 and 256 % forms[0].block_n == 0


def test_partial_results_stay_within_their_memory() -> None:
    for rows, group, tokens in itertools.product((1, 8, 256), (1, 4, 8), (64, 4096, 1 << 20)):
        shape = dataclasses.replace(SHAPE, group=group)
        (part,) = passes.passes(shape, [1] * rows, tokens, is_deterministic=True)
        assert part.num_slots * 8 * part.slot_rows * 130 * 4 <= passes.SLOT_BYTES
        assert (part.num_slots == 0) == (tokens <= TILE)
    (part,) = passes.passes(dataclasses.replace(SHAPE, window=100), [1] * 8, 1 << 20, is_deterministic=True)
    assert part.num_slots == 8 * 3, "a window of 100 lies in at most three tiles"
    (part,) = passes.passes(SHAPE, [1] * 8, 1 << 20, is_deterministic=False)
    assert part.num_slots == 2 * (part.num_segments - 1), "every border ends one part and begins another"


# -- the work list -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A segment's part of a unit."""

    segment: int
    row: int
    first_packed: int
    tiles: range
    is_whole: bool
    slots: range
    """Slots of its partial results: one in parts or if it has the unit's first tile, else one for each tile."""


def pieces(listed: work.Work) -> Iterator[Piece]:
    """Pieces that the programs compute from a list."""
    units, segments = listed.units.tolist(), listed.segments.tolist()
    for segment, ((begin, unit, first_slot, _), (end, _, last_slot, _)) in enumerate(itertools.pairwise(segments)):
        while begin < end:
            row, _, _, first_packed, _, first_tile, unit_begin, _ = units[unit]
            unit_end = units[unit + 1][6]
            stop = min(end, unit_end)
            is_from_start = begin == unit_begin
            is_whole = is_from_start and stop == unit_end
            slot = last_slot - 1 if is_from_start else first_slot
            num_slots = 0 if is_whole else 1 if is_from_start or listed.part.is_in_parts else stop - begin
            tiles = range(first_tile + begin - unit_begin, first_tile + stop - unit_begin)
            yield Piece(segment, row, first_packed, tiles, is_whole, range(slot, slot + num_slots))
            begin, unit = stop, unit + 1


def combined(listed: work.Work) -> Iterator[tuple[int, int, range]]:
    """(row, first packed row, slots) of each unit that is combined."""
    units, segments = listed.units.tolist(), listed.segments.tolist()
    for (before, *_), (cut, unit, slot, _) in itertools.pairwise(segments[:-1]):
        if before <= units[unit][6] < cut:
            end = units[unit + 1][6]
            # As in `_combine`: the slot of the unit's last part is that of the last border in it.
            last = max(slot for border, _, slot, _ in segments if cut <= border < end)
            behind = last - slot + 1 if listed.part.is_in_parts else end - cut
            yield units[unit][0], units[unit][3], range(slot - 1, slot + behind)


def seen_tiles(
    rows: Sequence[tuple[int, int]], group: int, block_m: int, window: int | None, lens: range
) -> Iterator[tuple[int, int, range]]:
    """(row, first packed row, tiles) of each unit, by definition."""
    for row, (start, count) in enumerate(rows):
        for first in range(0, count * group if count in lens else 0, block_m):
            queries = [start + packed // group for packed in range(first, min(first + block_m, count * group))]
            first_seen = 0 if window is None else max(0, queries[0] - window + 1)
            yield row, first, range(first_seen // TILE, queries[-1] // TILE + 1)


def random_case(seed: int) -> tuple[list[tuple[int, int]], int, int, int | None, range]:
    draw = random.Random(seed)
    rows = [
        (draw.randrange(draw.choice((1, 600, 5000))), draw.choice((1, 1, 1, 4, draw.randrange(1, 200))))
        for _ in range(draw.choice((1, 2, 5, 40)))
    ]
    low, high = draw.choice(((1, 1 << 31), (1, 1), (2, 1 << 31)))
    return rows, draw.choice((1, 3, 4, 8)), draw.choice((16, 32)), draw.choice((None, 1, 100)), range(low, high + 1)


def part_of(
    num_units: int,
    num_segments: int,
    num_slots: int,
    block_m: int,
    lens: range,
    *,
    is_cut: bool,
    in_parts: bool = False,
) -> passes.Pass:
    most = min(lens.stop - 1, passes.MAX_QUERIES)
    form = passes.form(128, 2, block_m)
    return passes.Pass(form, lens.start, most, num_units, num_segments, is_cut, num_slots, block_m, in_parts)


def batch_of(rows: Sequence[tuple[int, int]]) -> AttentionBatch:
    width = max(start + count for start, count in rows) // 16 + 1
    return AttentionBatch.build(rows, torch.zeros(len(rows), width, dtype=torch.int32), 16, "cpu")


@pytest.mark.sampled(keep=10)
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("num_segments", [1, 2, 7, 60])
def test_every_tile_once_in_order_and_evenly(seed: int, num_segments: int, in_parts: bool) -> None:
    rows, group, block_m, window, lens = random_case(seed)
    units = list(seen_tiles(rows, group, block_m, window, lens))
    num_slots = 2 * (num_segments - 1) if in_parts else sum(len(tiles) for *_, tiles in units)
    part = part_of(len(units) + 3, num_segments, num_slots, block_m, lens, is_cut=True, in_parts=in_parts)
    listed = work.build(part, batch_of(rows), group, window)
    found = list(pieces(listed))

    by_unit = itertools.groupby(found, key=lambda piece: (piece.row, piece.first_packed))
    joined = [(*unit, [tile for piece in parts for tile in piece.tiles]) for unit, parts in by_unit]
    assert joined == [(row, first, list(tiles)) for row, first, tiles in units]
    sizes = [sum(len(piece.tiles) for piece in found if piece.segment == segment) for segment in range(num_segments)]
    assert max(sizes) - min(sizes) <= 1

    cut = [piece for piece in found if not piece.is_whole]
    slots = [slot for piece in cut for slot in piece.slots]
    assert slots == list(range(len(slots))) and len(slots) <= num_slots
    by_unit = itertools.groupby(cut, key=lambda piece: (piece.row, piece.first_packed))
    expected = [(*unit, [slot for piece in parts for slot in piece.slots]) for unit, parts in by_unit]
    assert [(row, first, list(range_)) for row, first, range_ in combined(listed)] == expected


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_cut", [True, False])
def test_units_stay_whole_where_slots_are_too_few(seed: int, is_cut: bool) -> None:
    """The same holds if each unit is a segment of its own."""
    rows, group, block_m, window, lens = random_case(seed)
    rows.append((900, max(lens.start, 1)))
    units = list(seen_tiles(rows, group, block_m, window, lens))
    num_segments = 40 if is_cut else len(units) + 2
    part = part_of(len(units) + 2, num_segments, 0, block_m, lens, is_cut=is_cut)
    listed = work.build(part, batch_of(rows), group, window)
    found = list(pieces(listed))
    assert [(piece.row, piece.first_packed, piece.tiles) for piece in found] == units
    assert all(piece.is_whole for piece in found) and not list(combined(listed))
    assert is_cut or [piece.segment for piece in found] == list(range(len(units)))


def test_more_rows_units_and_segments_than_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_CHUNK", 32)
    monkeypatch.setattr(work, "_ROWS", 2)
    rows = [(0, 900), (70, 1), (3, 300), (9, 2), (5, 40)]
    units = list(seen_tiles(rows, 1, 16, 1, range(1, 1000)))
    assert len(units) > 64
    for num_segments, is_cut in ((100, True), (len(units) + 1, False)):
        part = part_of(len(units), num_segments, 1000, 16, range(1, 1000), is_cut=is_cut)
        found = list(pieces(work.build(part, batch_of(rows), 1, 1)))
        assert sum(len(piece.tiles) for piece in found) == sum(len(tiles) for *_, tiles in units)
        assert list(dict.fromkeys((piece.row, piece.first_packed) for piece in found)) == [unit[:2] for unit in units]


def test_a_step_makes_a_list_for_each_window_once(monkeypatch: pytest.MonkeyPatch) -> None:
    build, windows = work.build, []
    monkeypatch.setattr(work, "build", lambda *call: windows.append(call[-1]) or build(*call))
    sequences = Sequences(((0, 1), (70, 1)), 1, 16, 16, torch.float32)
    q = torch.randn(2, 1, 16)
    for batch in (sequences.batch([0, 1]), sequences.batch([0, 1])):
        for window in (None, 30, None, 30, None):
            paged_attention(q, sequences.kv, batch, SCALE, window)
    assert windows == [None, 30, None, 30]


# -- results -----------------------------------------------------------------------------------------------------------

SHAPES = [
    (4, 1, 64, 16, None, None, torch.bfloat16, None),
    (4, 2, 80, 32, 50, None, torch.float32, None),
    (1, 1, 128, 64, None, 5.0, torch.float16, None),
    (8, 1, 256, 16, TILE + 3, 3.0, torch.float32, None),
    (7, 1, 96, 32, None, None, torch.float32, None),
    (4, 1, 64, 16, None, None, torch.bfloat16, FP8),
    (8, 1, 80, 32, 50, 5.0, torch.float32, FP8),
    (2, 1, 128, 16, None, None, torch.float16, FP8),
    (4, 1, 64, 16, None, None, torch.bfloat16, INT8),
    (2, 1, 96, 16, None, None, torch.float16, INT8),
]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.25 * 2**-7, torch.float16: 1.25 * 2**-10}
"""As in `test_paged_attention.py`."""


def attend(
    sequences: Sequences,
    q: Tensor,
    rows: Sequence[int],
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    **changed: object,
) -> Tensor:
    batch = dataclasses.replace(sequences.batch(rows), **changed)  # type: ignore[arg-type]
    return paged_attention(q, sequences.kv, batch, SCALE, window, softcap, sequences.kv_scales, sinks)


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "softcap", "dtype", "kv_dtype"), SHAPES
)
def test_bits_depend_on_nothing_but_the_sequence(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    request: pytest.FixtureRequest,
) -> None:
    """Results are right, and the same for any number of programs, for both ways of chunks, alone and in pieces."""
    sequences = Sequences(ROWS, kv_heads, head_dim, block_size, kv_dtype or dtype)
    every = range(len(ROWS))
    starts = sequences.batch(every).query_start.tolist()
    q = torch.randn(starts[-1], heads, head_dim).to(dtype)
    set_device(monkeypatch, 3 * kv_heads)
    sinks = sinks_of(heads) if window == 50 else None
    whole = attend(sequences, q, every, window, softcap, sinks)
    for row, (start, _) in enumerate(ROWS):
        tokens = slice(starts[row], starts[row + 1])
        expected = dense(q[tokens], sequences.contents[row], start, SCALE, window, softcap, sinks)
        assert (whole[tokens].double() - expected).abs().max() < TOLERANCE[dtype], f"row {row}"

    for num_sms, sm, is_deterministic in ((1, 80, False), (40, 80, True)):
        set_device(monkeypatch, num_sms * kv_heads, sm)
        again = attend(sequences, q, every, window, softcap, sinks, is_deterministic=is_deterministic)
        if is_deterministic or not is_on_gpu(request.config):
            assert torch.equal(again, whole)
        else:
            # Other tensor core instructions, with roundings of their own.
            assert (again.double() - whole.double()).abs().max() < 2 * TOLERANCE[dtype]
    for row, count in ((1, 1), (5, 8), (6, 2)):
        start, length = ROWS[row]
        for first in range(0, length, count):
            last = min(length, first + count)
            part = AttentionBatch.build(
                [(start + first, last - first)], sequences.tables[[row]], block_size, "cpu", is_deterministic=False
            )
            tokens = slice(starts[row] + first, starts[row] + last)
            result = paged_attention(
                q[tokens].clone(), sequences.kv, part, SCALE, window, softcap, sequences.kv_scales, sinks
            )
            assert torch.equal(result, whole[tokens]), f"row {row}, tokens {first}..{last}"


PARTS = [
    (4, 1, 64, 16, None, None, torch.bfloat16),
    (4, 2, 80, 32, 50, None, torch.float32),
    (1, 1, 128, 64, None, 5.0, torch.float16),
    (8, 1, 256, 16, TILE + 3, 3.0, torch.float32),
    (7, 1, 96, 32, 1, None, torch.float32),
]


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("num_sms", [1, 3, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window", "softcap", "dtype"), PARTS)
def test_parts_give_the_same_results_but_for_roundings(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    num_sms: int,
) -> None:
    """Units stay whole on one multiprocessor, lie in few parts on three, and in one part a tile on forty."""
    sequences = Sequences(ROWS, kv_heads, head_dim, block_size, dtype)
    every = range(len(ROWS))
    starts = sequences.batch(every).query_start.tolist()
    q = torch.randn(starts[-1], heads, head_dim).to(dtype)
    set_device(monkeypatch, num_sms * kv_heads)
    sinks = sinks_of(heads) if window == 50 else None
    result = attend(sequences, q, every, window, softcap, sinks, is_deterministic=False)
    for row, (start, _) in enumerate(ROWS):
        tokens = slice(starts[row], starts[row + 1])
        expected = dense(q[tokens], sequences.contents[row], start, SCALE, window, softcap, sinks)
        assert (result[tokens].double() - expected).abs().max() < TOLERANCE[dtype], f"row {row}"


def test_uncut_units_of_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chunk behind others, in blocks of 128 packed rows, with and without a window."""
    monkeypatch.setattr(passes, "_WAVES", 1)
    set_device(monkeypatch, 2)
    rows = ((70, 90), (0, 100))
    sequences = Sequences(rows, 1, 64, 16, torch.float32)
    q = torch.randn(190, 4, 64)
    for window in (None, 75):
        assert [
            part.part.form.block_m for part in kernel._work(q, sequences.kv, undetermined(sequences), window, None)
        ] == [128]
        result = attend(sequences, q, [0, 1], window, None, is_deterministic=False)
        for row, tokens in enumerate((slice(0, 90), slice(90, 190))):
            expected = dense(q[tokens], sequences.contents[row], rows[row][0], SCALE, window, None)
            assert (result[tokens].double() - expected).abs().max() < TOLERANCE[torch.float32]


def test_rows_whose_queries_only_the_device_knows_have_launches_of_both_kinds() -> None:
    bounds = [512, *[1] * 63]
    assert launches(bounds, knows_lens=False) == [(64, True), (64, True)]
    assert launches(bounds, knows_lens=False, sm=80) == [(64, True), (64, True)]
    assert launches(bounds, knows_lens=False, group=71, num_kv_heads=1) == [(64, True)], "one query is a long row"
    assert launches([8, *[1] * 7], knows_lens=False) == [(64, True)], "15 queries, and a long row has 17"
    assert launches(bounds, knows_lens=False, is_deterministic=True) == [(32, True)]
    assert launches(bounds, knows_lens=False, sm=103) == [(32, True)]


@pytest.mark.parametrize("group", [1, 3, 4, 8, 71])
def test_launches_have_units_for_any_rows_of_so_many_tokens(group: int) -> None:
    rng = random.Random(group)
    for _ in range(300):
        num_tokens = rng.randint(1, 300)
        num_rows = rng.randint(1, min(40, num_tokens))
        borders = sorted(rng.sample(range(1, num_tokens), num_rows - 1))
        lens = [end - start for start, end in itertools.pairwise([0, *borders, num_tokens])]
        bounds = [num_tokens, *[1] * (num_rows + rng.randint(0, 3) - 1)]
        shape = dataclasses.replace(SHAPE, group=group)
        found = passes.passes(shape, bounds, 8192, is_deterministic=False, knows_lens=False)
        for length in lens:
            assert sum(part.min_queries <= length <= part.max_queries for part in found) == 1
        for part in found:
            own = [length for length in lens if part.min_queries <= length <= part.max_queries]
            assert sum(-(-length * group // part.form.block_m) for length in own) <= part.num_units


@pytest.mark.parametrize(
    "rows",
    [
        ((70, 3), (0, 40), (20, 5)),
        ((300, 1), (45, 1), (7, 1)),
        ((270, 30), (0, 17), (3, 1)),
        ((0, 48),),
    ],
    ids=["both kinds", "decodes alone", "a row at the border", "one prompt"],
)
@pytest.mark.parametrize("num_idle", [0, 2])
def test_both_kinds_of_launch_compute_the_rows_of_their_kind(rows: tuple[tuple[int, int], ...], num_idle: int) -> None:
    """The host has only bounds, which no row has here. Rows behind the last one have no queries."""
    num_tokens, num_rows = sum(count for _, count in rows), len(rows)
    sequences = Sequences(rows, 1, 64, 16, torch.float32)
    own = sequences.batch(range(num_rows))
    batch = dataclasses.replace(
        own,
        query_start=torch.nn.functional.pad(own.query_start, (0, num_idle), value=num_tokens),
        seq_lens=torch.nn.functional.pad(own.seq_lens, (0, num_idle)),
        block_tables=torch.nn.functional.pad(own.block_tables, (0, 0, 0, num_idle)),
        query_lens=(num_tokens, *[1] * (num_rows + num_idle - 1)),
        host_seq_lens=None,
        is_deterministic=False,
        knows_query_lens=False,
    )
    q = torch.randn(num_tokens, 4, 64)
    result = paged_attention(q, sequences.kv, batch, SCALE)
    assert all(launch.part.is_in_parts for launch in kernel._work(q, sequences.kv, batch, None, None))
    first = 0
    for row, (start, count) in enumerate(rows):
        tokens = slice(first, first + count)
        expected = dense(q[tokens], sequences.contents[row], start, SCALE, None, None)
        assert (result[tokens].double() - expected).abs().max() < TOLERANCE[torch.float32], f"row {row}"
        first += count


def test_only_small_blocks_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode beside a long chunk, within a recording whose kernels start early."""
    run, seen = kernel._run, []

    def watched(_: object, *others: Any) -> None:
        run(lambda _, __, options: seen.append((options["BLOCK_M"], options["launch_pdl"])), *others)

    monkeypatch.setattr(kernel, "_run", watched)
    set_device(monkeypatch, 2)
    monkeypatch.setattr(partial, "combine", lambda *_, **__: None)
    sequences = Sequences(((70, 1), (0, 100)), 1, 64, 16, torch.float32)
    with gpu.early_starts():
        paged_attention(torch.randn(101, 4, 64), sequences.kv, undetermined(sequences), SCALE)
    assert seen == [(16, True), (64, False)]


def undetermined(sequences: Sequences) -> AttentionBatch:
    return dataclasses.replace(sequences.batch([0, 1]), is_deterministic=False)


def test_the_tolerance_sees_a_block_of_keys_without_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks at the diagonal count as full: queries see keys behind their own."""
    sequences = Sequences([(0, 30)], 1, 64, 16, torch.float32)
    q = torch.randn(30, 4, 64)
    expected = dense(q, sequences.contents[0], 0, SCALE, None, None)
    right = attend(sequences, q, [0], None, None, is_deterministic=False)
    assert (right.double() - expected).abs().max() < TOLERANCE[torch.float32]
    add = in_parts_kernel._add_block
    monkeypatch.setattr(in_parts_kernel, "_add_block", lambda *values: add(*values[:6], values[6] + 20, *values[7:]))
    wrong = attend(sequences, q, [0], None, None, is_deterministic=False)
    assert (wrong.double() - expected).abs().max() > 100 * TOLERANCE[torch.float32]


def test_bits_show_another_order_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: tiles of another size, or blocks of keys of another size within them, change bits."""
    sequences = Sequences([(300, 1)], 1, 64, 16, torch.float32)
    q = torch.randn(1, 4, 64)
    right = attend(sequences, q, [0], None, None)
    set_tile(monkeypatch, 2 * TILE)
    assert not torch.equal(attend(sequences, q, [0], None, None), right)
    set_tile(monkeypatch, TILE)
    form = passes.form
    monkeypatch.setattr(passes, "form", lambda *shape: dataclasses.replace(form(*shape), block_n=TILE // 2))
    assert not torch.equal(attend(sequences, q, [0], None, None), right)


def test_the_tolerance_sees_partial_results_that_are_added_without_their_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences([(300, 1)], 1, 64, 16, torch.float32)
    q = torch.randn(1, 4, 64)
    expected = dense(q, sequences.contents[0], 300, SCALE, None, None)
    for module in (tiles, partial):
        monkeypatch.setattr(module, "merge", lambda *parts: (parts[3], parts[1] + parts[4], parts[2] + parts[5]))
    wrong = attend(sequences, q, [0], None, None)
    assert (wrong.double() - expected).abs().max() > 100 * TOLERANCE[torch.float32]


def test_tiles_of_the_length_that_is_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile(monkeypatch, 256)
    rows = ((600, 1), (250, 12))
    sequences = Sequences(rows, 1, 64, 32, torch.bfloat16)
    q = torch.randn(13, 4, 64).to(torch.bfloat16)
    set_device(monkeypatch, 2)
    result = attend(sequences, q, [0, 1], None, None)
    for row, tokens in enumerate((slice(0, 1), slice(1, 13))):
        expected = dense(q[tokens], sequences.contents[row], rows[row][0], SCALE, None, None)
        assert (result[tokens].double() - expected).abs().max() < TOLERANCE[torch.bfloat16]
    set_device(monkeypatch, 1)
    assert torch.equal(attend(sequences, q, [0, 1], None, None), result)


def test_rows_without_queries_and_lengths_that_the_host_does_not_know() -> None:
    """A graph's padding: the device finds fewer queries than the graph has space for."""
    rows = ((200, 1), (90, 1), (40, 1))
    sequences = Sequences(rows, 1, 64, 16, torch.float32)
    q = torch.randn(4, 4, 64)
    padded = dataclasses.replace(
        sequences.batch([0, 1, 2]),
        query_start=torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32),
        seq_lens=torch.tensor([201, 7, 41, 0], dtype=torch.int32),
        block_tables=sequences.tables[[0, 1, 2, 2]],
        positions=torch.tensor([200, 40, 0, 0]),
        query_lens=(1, 1, 1, 1),
        host_seq_lens=(1, 1, 1, 1),
    )
    result = paged_attention(q, sequences.kv, padded, SCALE)
    for token, row in ((0, 0), (1, 2)):
        expected = dense(q[token : token + 1], sequences.contents[row], rows[row][0], SCALE, None, None)
        assert (result[token].double() - expected[0]).abs().max() < TOLERANCE[torch.float32]
