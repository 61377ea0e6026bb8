"""A pool of 8 bits, written by `rope_and_cache` and read by `paged_attention`: near one of 16 bits, and the bound
detects wrong scales."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inferd.engine.api.memory.precision import KV_FORMATS as PLANNED_FORMATS
from inferd.kernels.ops.kv_format import KV_FORMATS, KV_GROUP, KV_SCALE_DTYPE, head_bytes
from inferd.kernels.ops.paged_attention import AttentionBatch, paged_attention
from inferd.kernels.ops.rope import rope_and_cache
from tests.kernels.pools import nan_scales

IS_RECORDED = False
ROWS = ((20, 1), (0, 24), (15, 2))
BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 16, 2, 64
BOUNDS = {torch.float8_e4m3fn: 0.04, torch.int8: 0.012}
"""Share of the results' norm. An 8-bit float is off by up to 2^-4 of itself, 2.2% in the mean square. Keys are off by
the same, which changes weights by as much again: 3.2% in all. An integer is off by up to half of 1/127 of its group's
largest element, which is 0.5% in the mean square, and 0.7% in all."""


class Step:
    """Random tokens of three rows. One step writes and reads all of their keys."""

    def __init__(self, size: float) -> None:
        counts = [start + count for start, count in ROWS]
        tables = torch.arange(3 * 4, dtype=torch.int32).view(3, 4)
        self.batch = AttentionBatch.build([(0, count) for count in counts], tables, BLOCK_SIZE, "cpu")
        heads = (torch.randn(sum(counts), count, HEAD_DIM) for count in (4, NUM_KV_HEADS, NUM_KV_HEADS))
        self.q, self.k, self.v = (part.to(torch.bfloat16) for part in heads)
        self.k, self.v = self.k * size, self.v * size
        self.scale = HEAD_DIM**-0.5 / float(self.k.abs().mean())
        self.smoothing: Tensor | None = None
        angles = torch.randn(100, HEAD_DIM // 2)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)

    def enlarge_keys(self) -> None:
        """Have one channel in 16 of K 32 times as large as the others, and those of q as small."""
        self.k[..., ::16] *= 32
        self.q[..., ::16] /= 32
        pairs = torch.arange(HEAD_DIM) % (HEAD_DIM // 2) % 16 == 0
        powers = torch.where(pairs, 1.0, 2.0**-5).expand(NUM_KV_HEADS, HEAD_DIM)
        self.smoothing = torch.stack([powers, 1 / powers])

    def attend(self, dtype: torch.dtype, change: Callable[[Tensor], Tensor] = lambda scales: scales) -> Tensor:
        kv = torch.full((12, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), float("nan")).to(dtype)
        scales = nan_scales(kv)
        slots = self.batch.write_slots
        q = rope_and_cache(
            self.q, self.k, self.v, self.cos_sin, self.batch.positions, slots, kv, kv_scales=scales,
            smoothing=self.smoothing,
        )  # fmt: skip
        return paged_attention(q, kv, self.batch, self.scale, None, None, None if scales is None else change(scales))

    def error(self, dtype: torch.dtype, change: Callable[[Tensor], Tensor] = lambda scales: scales) -> float:
        exact = self.attend(torch.bfloat16).double()
        return float((self.attend(dtype, change).double() - exact).norm() / exact.norm())


@pytest.mark.sampled(keep=1, of="triton")
@pytest.mark.parametrize("dtype", KV_FORMATS)
@pytest.mark.parametrize("size", [1.0, 2.0**-20, 2.0**20])
def test_it_is_near_a_pool_of_16_bits_whatever_the_size_of_its_numbers(dtype: torch.dtype, size: float) -> None:
    assert 1e-3 < Step(size).error(dtype) < BOUNDS[dtype]


@pytest.mark.sampled(keep=1, of="triton")
@pytest.mark.parametrize("dtype", KV_FORMATS)
@pytest.mark.parametrize(
    "change",
    [
        lambda scales: scales.flip(1).contiguous(),
        lambda scales: torch.where(scales.roll(1, 3).isnan(), scales, scales.roll(1, 3)),
        lambda scales: scales.roll(1, 2),
        lambda scales: scales.roll(1, 4),
        lambda scales: scales * 1.04,
    ],
    ids=["of K for V", "of the next token", "of the next head", "of the next group", "4% too large"],
)
def test_the_bound_sees_wrong_scales(dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> None:
    assert Step(1.0).error(dtype, change) > BOUNDS[dtype]


@pytest.mark.sampled(keep=1, of="triton")
def test_smoothing_keeps_small_channels_beside_large_ones() -> None:
    step = Step(1.0)
    step.enlarge_keys()
    smoothing, step.smoothing = step.smoothing, None
    plain = step.error(torch.int8)
    step.smoothing = smoothing
    assert step.error(torch.int8) < plain / 4


@pytest.mark.parametrize("head_dim", [16, 40, 64, 96, 128, 256])
def test_plans_count_the_bytes_of_each_format(head_dim: int) -> None:
    assert {getattr(torch, form.dtype) for form in PLANNED_FORMATS.values()} == set(KV_FORMATS)
    for form in PLANNED_FORMATS.values():
        assert (form.group_size, form.scale_bytes) == (KV_GROUP, KV_SCALE_DTYPE.itemsize)
        assert form.head_bytes(head_dim).value == head_bytes(head_dim, getattr(torch, form.dtype))
