"""A pool of 8-bit floats in plain PyTorch: attention reads from it the numbers that it holds."""

from __future__ import annotations

import pytest
import torch

from inferd.kernels.paged_attention import AttentionBatch, paged_attention
from inferd.kernels.paged_attention.reference import paged_attention as plain_attention
from inferd.kernels.rope import rope_and_cache

ROWS = ((300, 1), (0, 40), (255, 2))
BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 16, 2, 32


def pool_of(dtype: torch.dtype) -> torch.Tensor:
    """NaN but for the blocks that rows may see, where it holds numbers of all sizes."""
    kv = torch.full((80, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), float("nan")).to(dtype)
    kv[:60] = (torch.randn(60, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM) * 3).to(dtype)
    return kv


def batch() -> AttentionBatch:
    tables = torch.randperm(60, dtype=torch.int32).view(3, 20)
    return AttentionBatch.build(ROWS, tables, BLOCK_SIZE, "cpu")


@pytest.mark.parametrize("window", [None, 100])
def test_attention_reads_what_the_pool_holds(window: int | None) -> None:
    """Bit for bit what a pool of the same numbers in fp32 gives, through the op, which takes it on a CPU."""
    kv, step = pool_of(torch.float8_e4m3fn), batch()
    q = torch.randn(step.num_tokens, 8, HEAD_DIM)
    wide = plain_attention(q, kv.to(torch.float32), step, 0.2, window, None)
    assert bool(wide.isfinite().all())
    assert torch.equal(paged_attention(q, kv, step, 0.2, window), wide)
    narrow = q.to(torch.bfloat16)
    expected = plain_attention(narrow, kv.to(torch.float32), step, 0.2, window, None)
    assert torch.equal(paged_attention(narrow, kv, step, 0.2, window), expected)


def test_written_and_read_again_it_is_near_a_pool_of_16_bits() -> None:
    """A value is off by up to 2^-4 of itself; over hundreds of them attention is off by less."""
    step = batch()
    q, k, v = (torch.randn(step.num_tokens, heads, HEAD_DIM).to(torch.bfloat16) for heads in (8, 2, 2))
    angles = torch.randn(400, HEAD_DIM // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    results = []
    pool = pool_of(torch.float8_e4m3fn)
    for kv in (pool, pool.to(torch.bfloat16)):
        turned = rope_and_cache(q, k, v, cos_sin, step.positions, step.write_slots, kv)
        results.append(paged_attention(turned, kv, step, HEAD_DIM**-0.5).double())
    error = (results[0] - results[1]).norm() / results[1].norm()
    assert 1e-4 < float(error) < 2**-4
