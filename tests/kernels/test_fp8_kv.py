"""A pool of 8-bit floats, written and read: its error against 16 bits is bounded, and the bound detects wrong
scales."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inferd.kernels.paged_attention import AttentionBatch, paged_attention
from inferd.kernels.rope import rope_and_cache

pytestmark = pytest.mark.usefixtures("implementation")

FP8 = torch.float8_e4m3fn
ROWS = ((20, 1), (0, 24), (15, 2))
BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 16, 2, 32
BOUND = 0.04
"""Share of the results' norm. A number is off by up to 2^-4 of itself, 2.2% in the mean square. Keys are off by the
same, which changes weights by as much again: 3.2% in all."""


class Step:
    """Random tokens of three rows. One step writes and reads all of their keys."""

    def __init__(self, size: float) -> None:
        counts = [start + count for start, count in ROWS]
        tables = torch.arange(3 * 4, dtype=torch.int32).view(3, 4)
        self.batch = AttentionBatch.build([(0, count) for count in counts], tables, BLOCK_SIZE, "cpu")
        heads = (torch.randn(sum(counts), count, HEAD_DIM) for count in (4, NUM_KV_HEADS, NUM_KV_HEADS))
        self.q, self.k, self.v = (part.to(torch.bfloat16) for part in heads)
        self.k, self.v = self.k * size, self.v * size
        angles = torch.randn(100, HEAD_DIM // 2)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)

    def attend(self, dtype: torch.dtype, change: Callable[[Tensor], Tensor] = lambda scales: scales) -> Tensor:
        kv = torch.full((12, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), float("nan")).to(dtype)
        scales = torch.full(kv.shape[:4], float("nan")) if dtype == FP8 else None
        slots = self.batch.write_slots
        q = rope_and_cache(self.q, self.k, self.v, self.cos_sin, self.batch.positions, slots, kv, kv_scales=scales)
        scale = HEAD_DIM**-0.5 / float(self.k.abs().mean())
        return paged_attention(q, kv, self.batch, scale, None, None, None if scales is None else change(scales))

    def error(self, change: Callable[[Tensor], Tensor] = lambda scales: scales) -> float:
        exact = self.attend(torch.bfloat16).double()
        return float((self.attend(FP8, change).double() - exact).norm() / exact.norm())


@pytest.mark.sampled(keep=1, of="triton")
@pytest.mark.parametrize("size", [1.0, 2.0**-20, 2.0**20])
def test_it_is_near_a_pool_of_16_bits_whatever_the_size_of_its_numbers(size: float) -> None:
    assert 1e-3 < Step(size).error() < BOUND


@pytest.mark.sampled(keep=1, of="triton")
@pytest.mark.parametrize(
    "change",
    [
        lambda scales: scales.flip(1).contiguous(),
        lambda scales: torch.where(scales.roll(1, 3).isnan(), scales, scales.roll(1, 3)),
        lambda scales: scales.roll(1, 2),
        lambda scales: scales * 1.04,
    ],
    ids=["of K for V", "of the next token", "of the next head", "4% too large"],
)
def test_the_bound_sees_wrong_scales(change: Callable[[Tensor], Tensor]) -> None:
    assert Step(1.0).error(change) > BOUND
