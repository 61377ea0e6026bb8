"""The Triton kernel of attention over K and V in e4m3: its numbers, and its results in the interpreter."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.device import DeviceProperties
from inferd.kernels.ops.paged_attention import PAGED_ATTENTION, paged_attention
from tests.kernels import interpreter
from tests.kernels.test_paged_attention import FP8, Sequences, dense, sinks_of

pytest.importorskip("triton")

import triton
import triton.language as tl

from inferd.kernels.ops.paged_attention import parts_fp8, passes, tiles, work
from inferd.kernels.ops.paged_attention import triton as kernel

TILE = 64
SCALE = 0.2
ROWS = ((0, 1), (300, 1), (TILE - 1, 1), (TILE, 1), (180, 5), (130, 4), (5, 2), (40, 60))
TOLERANCE = 1.25 * 2**-7
"""As in `test_paged_attention.py`, for bfloat16."""
BIAS = 2.0**120


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gpu.interpret(True)
    interpreter.repair()
    PAGED_ATTENTION.force("triton")
    for module in (passes, work, tiles, parts_fp8):
        monkeypatch.setattr(module, "ATTENTION_SPLIT", TILE)
    yield
    gpu.interpret(False)
    PAGED_ATTENTION.force(None)


def every_pair() -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


def assert_numbers(lower: Tensor, upper: Tensor) -> None:
    """Every pair of codes gives torch's numbers. Torch's NaN is 480 here: its mantissa is one more than 448's."""
    codes = every_pair().view(torch.uint8).view(-1, 2)
    for found, column in ((lower, codes[:, 0]), (upper, codes[:, 1])):
        expected = column.contiguous().view(torch.float8_e4m3fn).float()
        sign = torch.where(column > 127, -1.0, 1.0)
        assert torch.equal(found.float(), torch.where(expected.isnan(), sign * 480, expected))


@triton.jit
def _convert(pairs, lower, upper, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    low, high = parts_fp8._halves(tl.load(pairs + place), False)
    tl.store(lower + place, low)
    tl.store(upper + place, high)


def test_every_pair_of_codes() -> None:
    pairs = every_pair()
    lower, upper = torch.full((2, 1 << 16), float("nan"), dtype=torch.bfloat16)
    _convert[(16,)](pairs, lower, upper, 1 << 12)
    assert_numbers(lower, upper)


def test_the_instructions_give_the_same_bits() -> None:
    """The interpreter runs no machine instructions: this runs those of `HALVES` on registers of two equal pairs."""
    pairs = every_pair().to(torch.int64) & 0xFFFF
    registers = {"$2": pairs | (pairs << 16)}
    operations = {
        "shl": lambda a, b: (a << b) & 0xFFFFFFFF,
        "shr": lambda a, b: a >> b,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
    }
    found = re.findall(r"(\w+)\.b32 ([$\w]+), ([$\w]+), ([$\w]+);", parts_fp8.HALVES.split("\n", 2)[2])
    assert len(found) == 9 and parts_fp8.HALVES.count(";") == 10
    for name, target, left, right in found:
        value = registers[right] if right in registers else int(right, 0)
        registers[target] = operations[name](registers[left], value)
    halves = [registers[name] for name in ("$0", "$1")]
    for bits in halves:
        assert torch.equal(bits >> 16, bits & 0xFFFF)
    numbers = [(bits & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16) * BIAS for bits in halves]
    assert_numbers(*numbers)


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize("num_sms", [1, 3, 40])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window"), [(4, 1, 64, 16, None), (8, 2, 128, 32, 50)]
)
def test_results_are_right(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    num_sms: int,
) -> None:
    """Decodes and drafts run in this kernel, and a chunk of the same step in the other one."""
    launched = []
    launch = parts_fp8.launch
    monkeypatch.setattr(parts_fp8, "launch", lambda *given: launched.append(given) or launch(*given))
    monkeypatch.setattr(gpu, "properties_of", lambda *_: DeviceProperties.of(90, num_sms * kv_heads))
    kernel.ATTENTION_SPLIT_KERNEL.force(None)
    sequences = Sequences(ROWS, kv_heads, head_dim, block_size, FP8)
    batch = dataclasses.replace(sequences.batch(range(len(ROWS))), is_deterministic=False)
    starts = batch.query_start.tolist()
    q = torch.randn(starts[-1], heads, head_dim).to(torch.bfloat16)
    sinks = sinks_of(heads) if window else None
    result = paged_attention(q, sequences.kv, batch, SCALE, window, None, sequences.kv_scales, sinks)
    assert len(launched) == 1
    for row, (start, _) in enumerate(ROWS):
        tokens = slice(starts[row], starts[row + 1])
        expected = dense(q[tokens], sequences.contents[row], start, SCALE, window, None, sinks)
        assert (result[tokens].double() - expected).abs().max() < TOLERANCE, f"row {row}"


def test_a_lone_query_of_many_heads_is_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packed rows exceed the blocks of this kernel."""
    monkeypatch.setattr(parts_fp8, "launch", None)
    kernel.ATTENTION_SPLIT_KERNEL.force(None)
    sequences = Sequences(((70, 1),), 1, 64, 16, FP8)
    batch = dataclasses.replace(sequences.batch([0]), is_deterministic=False)
    q = torch.randn(1, 72, 64).to(torch.bfloat16)
    result = paged_attention(q, sequences.kv, batch, SCALE, None, None, sequences.kv_scales)
    expected = dense(q, sequences.contents[0], 70, SCALE, None, None)
    assert (result.double() - expected).abs().max() < TOLERANCE


def test_the_tolerance_sees_halves_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = parts_fp8._halves
    monkeypatch.setattr(parts_fp8, "_halves", lambda *given: halves(*given)[::-1])
    kernel.ATTENTION_SPLIT_KERNEL.force(None)
    sequences = Sequences(((70, 1),), 1, 64, 16, FP8)
    batch = dataclasses.replace(sequences.batch([0]), is_deterministic=False)
    q = torch.randn(1, 4, 64).to(torch.bfloat16)
    wrong = paged_attention(q, sequences.kv, batch, SCALE, None, None, sequences.kv_scales)
    expected = dense(q, sequences.contents[0], 70, SCALE, None, None)
    assert (wrong.double() - expected).abs().max() > 10 * TOLERANCE
