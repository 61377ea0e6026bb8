"""Paged attention agrees with dense attention in fp64, over pools that are NaN in all unwritten places."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.kv_format import KV_FORMATS, dequantize_heads, quantize_heads
from inferd.kernels.ops.paged_attention import ATTENTION_SPLIT, AttentionBatch, paged_attention
from tests.kernels.pools import nan_scales

TRITON = "triton"

pytestmark = pytest.mark.usefixtures("implementation")

SPLIT = ATTENTION_SPLIT
SPARE_BLOCKS = 20
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.25 * 2**-7}
"""Absolute, for values below four: one rounding of the result to the dtype, and the effect of rounded weights."""
DTYPES = (torch.float32, torch.bfloat16)
FP8, INT8 = KV_FORMATS
KINDS_8 = tuple(itertools.product(DTYPES, KV_FORMATS))
KINDS = (*((dtype, dtype) for dtype in DTYPES), *KINDS_8)
"""(dtype of queries, dtype of K and V)."""

ROWS: tuple[tuple[int, int], ...] = (
    (0, 1), (5, 1), (SPLIT - 1, 1), (SPLIT, 1), (700, 1), (0, 300), (513, 77), (SPLIT - 1, 2), (2, 3), (0, 129),
)  # fmt: skip
"""(start, tokens): decodes, prompts and chunks that end before, at and behind borders of tiles and of query blocks."""


SHORT_ROWS = ((0, 1), (SPLIT - 1, 1), (SPLIT + 20, 1), (SPLIT - 1, 2), (2, 3), (100, 9))
"""Few enough for an interpreter."""

FEW = ((0, 1), (1, 1), (40, 1), (150, 1), (SPLIT - 1, 1), (SPLIT, 1), (SPLIT + 43, 1), (94, 3), (200, 60))
"""(start, tokens): decodes and short chunks within a prompt of SPLIT + 44 tokens."""


@dataclass
class Sequences:
    """Random K and V of whole sequences, also as pages at random places. In 8 bits elements differ in magnitude."""

    rows: Sequence[tuple[int, int]]
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """Dtype of K and V."""

    def __post_init__(self) -> None:
        num_blocks = sum(-(-(start + count) // self.block_size) for start, count in self.rows) + SPARE_BLOCKS
        shape = (num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)
        self.kv = torch.full(shape, float("nan")).to(self.dtype)
        self.kv_scales = nan_scales(self.kv)
        free = [block for block in torch.randperm(shape[0]).tolist() if block]  # a hidden table entry may become 0
        width = max(start + count for start, count in self.rows) // self.block_size + 1
        self.tables = torch.full((len(self.rows), width), -1, dtype=torch.int32)
        self.contents: list[Tensor] = []
        for row, (start, count) in enumerate(self.rows):
            length = start + count
            content, scales = self._content(length)
            for entry in range(-(-length // self.block_size)):
                block = free.pop()
                self.tables[row, entry] = block
                page = content[:, :, entry * self.block_size : (entry + 1) * self.block_size]
                self.kv[block, :, :, : page.shape[2]] = page
                if self.kv_scales is not None:
                    self.kv_scales[block, :, :, : page.shape[2]] = scales[:, :, entry * self.block_size :][
                        :, :, : page.shape[2]
                    ]
            wide = content if self.kv_scales is None else dequantize_heads(content, scales)
            self.contents.append(wide.double())

    def _content(self, length: int) -> tuple[Tensor, Tensor]:
        """(K and V as stored, their scales)."""
        content = torch.randn(2, self.num_kv_heads, length, self.head_dim)
        if self.dtype not in KV_FORMATS:
            return content.to(self.dtype), content
        return quantize_heads(content * 2.0 ** torch.randint(-12, 1, content.shape), self.dtype)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The pool of 8 bits as one of `dtype`."""
        assert self.kv_scales is not None
        return dequantize_heads(self.kv, self.kv_scales).to(dtype).contiguous()

    def batch(self, rows: Sequence[int]) -> AttentionBatch:
        return AttentionBatch.build([self.rows[row] for row in rows], self.tables[list(rows)], self.block_size, "cpu")


def attend(
    sequences: Sequences,
    q: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    return paged_attention(q, sequences.kv, batch, scale, window, softcap, sequences.kv_scales, sinks)


def dense(
    q: Tensor,
    content: Tensor,
    start: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[n, Hq, D] fp64, from the whole score matrix at once, with repeated KV heads."""
    repeat = q.shape[1] // content.shape[1]
    k, v = content.repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,hkd->hqk", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query_positions = torch.arange(start, start + q.shape[0])[:, None]
    kv_positions = torch.arange(content.shape[2])
    is_hidden = kv_positions > query_positions
    if window is not None:
        is_hidden |= query_positions - kv_positions >= window
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, q.shape[0], 1)], dim=2)
    return torch.einsum("hqk,hkd->qhd", scores.softmax(-1)[..., : content.shape[2]], v)


def sinks_of(heads: int) -> Tensor:
    """Some below the scores of all keys, some above."""
    return torch.linspace(-6.0, 8.0, heads)[torch.randperm(heads)]


@pytest.mark.sampled(keep=6, of="triton")
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "softcap", "has_sinks"),
    [
        (8, 2, 64, 16, None, None, False),
        (4, 2, 128, 32, None, None, False),
        (3, 1, 96, 32, 40, None, False),
        (4, 1, 32, 32, 100, None, False),
        (3, 3, 40, 64, None, 5.0, False),
        (6, 1, 18, 16, 1, None, False),
        (2, 1, 16, 128, SPLIT + 3, 3.0, False),
        (16, 2, 32, 16, None, None, True),
        (6, 2, 24, 32, 128, None, True),
    ],
)
def test_equals_dense_attention(
    implementation: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    rows = SHORT_ROWS if implementation == TRITON else ROWS
    sequences = Sequences(rows, kv_heads, head_dim, block_size, kv_dtype)
    batch = sequences.batch(range(len(rows)))
    q = torch.randn(batch.num_tokens, heads, head_dim).to(dtype)
    scale, sinks = head_dim**-0.5, sinks_of(heads) if has_sinks else None
    result = attend(sequences, q, batch, scale, window, softcap, sinks)
    starts = batch.query_start.tolist()
    for row, (start, _) in enumerate(rows):
        tokens = slice(starts[row], starts[row + 1])
        expected = dense(q[tokens], sequences.contents[row], start, scale, window, softcap, sinks)
        assert (result[tokens].double() - expected).abs().max() < TOLERANCE[dtype], f"row {row}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_scores_may_be_huge(implementation: str, dtype: torch.dtype, window: int | None) -> None:
    """The highest score of a row then has all the weight. Rounding it must not make the weight infinite."""
    if implementation == TRITON:
        pytest.skip("the Triton kernel subtracts the highest score after scaling, in one fused operation")
    rows = ROWS
    sequences = Sequences(rows, 2, 64, 16, dtype)
    batch = sequences.batch(range(len(rows)))
    q = (torch.randn(batch.num_tokens, 4, 64) * 1e10).to(dtype)
    result = attend(sequences, q, batch, 0.125, window, None)
    starts = batch.query_start.tolist()
    for row, (start, _) in enumerate(rows):
        tokens = slice(starts[row], starts[row + 1])
        expected = dense(q[tokens], sequences.contents[row], start, 0.125, window, None)
        assert (result[tokens].double() - expected).abs().max() < TOLERANCE[dtype], f"row {row}"


@pytest.mark.sampled(keep=2, of="triton")
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS_8)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap"),
    [(8, 2, 64, None, None), (3, 1, 96, 40, None), (2, 1, 40, None, 5.0), (4, 1, 18, None, None)],
)
def test_a_pool_of_8_bits_has_the_bits_of_a_pool_of_its_elements(
    implementation: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
) -> None:
    rows = SHORT_ROWS if implementation == TRITON else ROWS
    sequences = Sequences(rows, kv_heads, head_dim, 16, kv_dtype)
    batch = sequences.batch(range(len(rows)))
    q = torch.randn(batch.num_tokens, heads, head_dim).to(dtype)
    result = attend(sequences, q, batch, 0.2, window, softcap)
    assert torch.equal(result, paged_attention(q, sequences.plain(dtype), batch, 0.2, window, softcap))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, *KV_FORMATS])
def test_blocks_may_lie_apart(implementation: str, kv_dtype: torch.dtype) -> None:
    """As parts of larger blocks, whose other parts hold NaN. Heads are of 512."""
    if implementation == TRITON:
        pytest.skip("the Triton kernel takes pools without gaps")
    sequences = Sequences(SHORT_ROWS, 2, 512, 16, kv_dtype)
    batch = sequences.batch(range(len(SHORT_ROWS)))
    q = torch.randn(batch.num_tokens, 4, 512).to(torch.bfloat16)
    expected = attend(sequences, q, batch, 0.05, 40, None)
    starts = batch.query_start.tolist()
    for row, (start, _) in enumerate(SHORT_ROWS):
        own = slice(starts[row], starts[row + 1])
        exact = dense(q[own], sequences.contents[row], start, 0.05, 40, None)
        assert (expected[own].double() - exact).abs().max() < TOLERANCE[torch.bfloat16], f"row {row}"
    kv, scales = _apart(sequences.kv), None if sequences.kv_scales is None else _apart(sequences.kv_scales)
    assert not kv.is_contiguous()
    assert torch.equal(paged_attention(q, kv, batch, 0.05, 40, None, scales), expected)


def _apart(blocks: Tensor) -> Tensor:
    nothing = torch.full(blocks.shape, float("nan")).to(blocks.dtype)
    return torch.stack([nothing, blocks, nothing], 1)[:, 1]


@pytest.mark.parametrize(("window", "softcap", "scale"), [(101, 4.0, 0.25), (100, None, 0.25), (100, 4.0, 0.3)])
def test_the_tolerance_sees_a_wrong_window_cap_or_scale(window: int, softcap: float | None, scale: float) -> None:
    sequences = Sequences([(200, 60)], 1, 16, 16, torch.float32)
    q = torch.randn(60, 2, 16)
    result = paged_attention(q, sequences.kv, sequences.batch([0]), 0.25, 100, 4.0)
    wrong = dense(q, sequences.contents[0], 200, scale, window, softcap)
    assert (result.double() - wrong).abs().max() > 100 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_below_all_scores_changes_no_bit_and_others_show(implementation: str, dtype: torch.dtype) -> None:
    rows = SHORT_ROWS if implementation == TRITON else ROWS
    sequences = Sequences(rows, 2, 64, 16, dtype)
    batch = sequences.batch(range(len(rows)))
    q = torch.randn(batch.num_tokens, 4, 64).to(dtype)
    plain = attend(sequences, q, batch, 0.125, 40, None)
    assert torch.equal(attend(sequences, q, batch, 0.125, 40, None, torch.full((4,), -1e30)), plain)
    wrong = attend(sequences, q, batch, 0.125, 40, None, torch.tensor([-1e30, 0.0, -1e30, -1e30]))
    differs = (wrong != plain).any(2)
    assert differs[:, 1].all() and not differs[:, [0, 2, 3]].any()
    assert (wrong - plain)[:, 1].abs().max() > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(8, 2, None), (3, 3, None), (5, 1, 90)])
def test_a_row_is_its_own(
    implementation: str, dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, kv_heads: int, window: int | None
) -> None:
    """A row has the same bits alone, in any order of rows, and with its tokens split over calls in any way."""
    if implementation == TRITON:
        pytest.skip("test_paged_attention_triton.py: by shapes that an interpreter gets through")
    sequences = Sequences(ROWS, kv_heads, 32, 16, kv_dtype)
    batch = sequences.batch(range(len(ROWS)))
    q = torch.randn(batch.num_tokens, heads, 32).to(dtype)
    sinks = sinks_of(heads) if window else None
    whole = attend(sequences, q, batch, 0.2, window, None, sinks)
    starts = batch.query_start.tolist()
    parts = [(q[first:last], whole[first:last]) for first, last in itertools.pairwise(starts)]

    order = torch.randperm(len(ROWS)).tolist()
    shuffled = torch.cat([parts[row][0] for row in order])
    result = attend(sequences, shuffled, sequences.batch(order), 0.2, window, None, sinks)
    assert torch.equal(result, torch.cat([parts[row][1] for row in order]))

    for row, (start, count) in enumerate(ROWS):
        for chunk in {1, 2, count} if count < 5 else {13, count} if count < 100 else {100, count}:
            for first in range(0, count, chunk):
                last = min(first + chunk, count)
                split = AttentionBatch.build([(start + first, last - first)], sequences.tables[[row]], 16, "cpu")
                result = attend(sequences, parts[row][0][first:last].clone(), split, 0.2, window, None, sinks)
                assert torch.equal(result, parts[row][1][first:last]), f"row {row}, tokens {first}..{last}"


@pytest.mark.sampled(keep=80)
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (90, None), (5, 5.0)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 2, 128), (3, 1, 96), (8, 1, 64), (4, 2, 48), (4, 4, 80), (4, 2, 72), (2, 1, 17), (2, 1, 256)],
)
def test_few_queries_have_the_bits_of_a_prompt(
    implementation: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """Decodes and short chunks, which take another path in the C++ kernel, have the bits of a prompt's queries."""
    if implementation == TRITON:
        pytest.skip("test_paged_attention_triton.py: by shapes that an interpreter gets through")
    length = SPLIT + 44
    sequences = Sequences([(0, length)], kv_heads, head_dim, 32, kv_dtype)
    q = torch.randn(length, heads, head_dim).to(dtype)
    sinks = sinks_of(heads) if window == 90 else None
    whole = attend(sequences, q, sequences.batch([0]), 0.2, window, softcap, sinks)
    for first, count in FEW:
        few = AttentionBatch.build([(first, count)], sequences.tables, 32, "cpu")
        result = attend(sequences, q[first : first + count].clone(), few, 0.2, window, softcap, sinks)
        assert torch.equal(result, whole[first : first + count]), f"tokens {first}..{first + count}"


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of Triton's interpreter
@pytest.mark.sampled(keep=4, of="triton")
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS)
@pytest.mark.parametrize("broken", [slice(40, 41), slice(0, SPLIT)], ids=["one key", "all keys of a tile"])
def test_nan_of_a_sequence_shows(dtype: torch.dtype, kv_dtype: torch.dtype, broken: slice) -> None:
    """Every query that sees a NaN gets NaN, and no other does."""
    length = SPLIT + 20
    sequences = Sequences([(0, length)], 1, 32, 16, kv_dtype)
    for position in range(broken.start, broken.stop):
        holder = sequences.kv if sequences.kv_scales is None else sequences.kv_scales
        holder[sequences.tables[0, position // 16], 0, 0, position % 16] = float("nan")
    q = torch.randn(length, 2, 32).to(dtype)
    for first, count in ((0, length), (length - 1, 1)):
        batch = AttentionBatch.build([(first, count)], sequences.tables, 16, "cpu")
        is_nan = attend(sequences, q[first : first + count], batch, 0.2, None, None).isnan()
        sees = torch.arange(first, first + count) >= broken.start
        assert torch.equal(is_nan, sees[:, None, None].expand_as(is_nan))


EVEN_ROWS = ((3 * SPLIT - 1, 1),) * 5
"""With two threads each row is cut as often as possible: a piece of work has one of the 15 tiles."""


@pytest.mark.parametrize("rows", [ROWS, EVEN_ROWS], ids=["of all lengths", "as many cut as can be"])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_threads_do_not_change_a_bit(implementation: str, num_threads: int, rows: Sequence[tuple[int, int]]) -> None:
    if implementation == TRITON:
        pytest.skip("Triton's interpreter has one thread")
    num_kv_heads = 1 if rows is EVEN_ROWS else 2
    sequences = Sequences(rows, num_kv_heads, 64, 16, torch.float32)
    batch = sequences.batch(range(len(rows)))
    q, sinks = torch.randn(batch.num_tokens, 4 * num_kv_heads, 64), sinks_of(4 * num_kv_heads)
    expected = attend(sequences, q, batch, 0.125, None, None, sinks)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(attend(sequences, q, batch, 0.125, None, None, sinks), expected)
    finally:
        torch.set_num_threads(before)


def test_many_decodes_of_all_lengths_at_once() -> None:
    """More rows than a group holds, not ordered by their lengths."""
    rows = [(int(start), 1) for start in torch.randint(0, 3 * SPLIT, (41,))]
    sequences = Sequences(rows[:20], 1, 16, 64, torch.float32)
    order = torch.randint(0, 20, (41,)).tolist()
    batch = sequences.batch(order)
    q = torch.randn(41, 2, 16)
    result = paged_attention(q, sequences.kv, batch, 0.25)
    for index, row in enumerate(order):
        expected = dense(q[index : index + 1], sequences.contents[row], rows[row][0], 0.25, None, None)
        assert (result[index].double() - expected[0]).abs().max() < TOLERANCE[torch.float32]


def test_metadata() -> None:
    tables = torch.tensor([[4, 2, -1], [9, -1, -1]], dtype=torch.int32)
    batch = AttentionBatch.build([(30, 4), (0, 2)], tables, 32, "cpu")
    assert batch.query_start.tolist() == [0, 4, 6]
    assert batch.positions.tolist() == [30, 31, 32, 33, 0, 1]
    assert batch.write_slots.tolist() == [4 * 32 + 30, 4 * 32 + 31, 2 * 32, 2 * 32 + 1, 9 * 32, 9 * 32 + 1]
    assert (batch.query_lens, batch.host_seq_lens, batch.seq_lens.tolist()) == ((4, 2), (34, 2), [34, 2])
