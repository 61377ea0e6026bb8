"""Causal attention over a paged KV pool. One call computes any mix of prompt chunks and decodes.

It supports grouped-query and multi-query heads, a sliding window, and a soft cap of the scores. A row's result depends
on its own sequence alone, bit for bit: neither on the batch, nor on how its tokens were split over steps. On a GPU that
holds for batches that are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.kv_format import check_scales, refuses_kv
from inferd.kernels.paged_attention import cpu, reference
from inferd.kernels.paged_attention.batch import ATTENTION_SPLIT, AttentionBatch
from inferd.kernels.registry import Deferred, Implementation, Op, always

__all__ = ["ATTENTION_SPLIT", "AttentionBatch", "paged_attention"]


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    heads_per_kv_head: int
    block_size: int
    has_window: bool
    has_softcap: bool


def _refuses_triton(key: Key) -> str | None:
    if key.head_dim > 256:
        return f"takes head sizes up to 256, not {key.head_dim}"
    if key.block_size & (key.block_size - 1):
        return f"takes block sizes that are powers of two, not {key.block_size}"
    if key.device_type == "cuda" and key.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies 16-bit numbers, not {key.dtype}"
    return refuses_kv(key.dtype, key.kv_dtype) or gpu.refuses(key.device_type, key.dtype, key.kv_dtype)


Run = Callable[[Tensor, Tensor, AttentionBatch, float, int | None, float | None, Tensor | None], Tensor]
PAGED_ATTENTION: Op[Key, Run] = Op(
    "paged_attention",
    [
        Implementation(
            "cpp",
            cpu.paged_attention,
            lambda key: cpu.refuses(key.device_type, key.dtype, key.kv_dtype, key.heads_per_kv_head, key.block_size),
        ),
        Implementation("triton", Deferred(f"{__name__}.triton", "paged_attention"), _refuses_triton),
        Implementation(
            "reference", reference.paged_attention, always, varies="rows of one length are multiplied together"
        ),
    ],
)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attend each query to the positions up to its own: [T, Hq, D] in q's dtype.

    q [T, Hq, D], contiguous. kv [blocks, 2 (k, v), G, block_size, D], contiguous, in q's dtype or in 8 bits, holds this
    step's tokens already. G divides Hq, and query head h reads KV head h // (Hq / G). With a `window` w a query sees
    the last w positions, its own included. `softcap` c turns a score s into c * tanh(s / c). Slots that no query sees
    may hold anything, NaN included.

    Exactly a pool of 8 bits (`kv_format`) has `kv_scales` [blocks, 2, G, block_size, groups]. Its elements are numbers
    times scales, rounded to q's dtype. For a deterministic batch, results have the bits of those over a pool of such
    elements.
    """
    assert q.shape[0] == batch.num_tokens and q.shape[2] == kv.shape[4] and q.shape[1] % kv.shape[2] == 0
    assert kv.shape[1] == 2 and kv.shape[3] == batch.block_size and kv.is_contiguous()
    assert window is None or window >= 1
    check_scales(kv, kv_scales)
    key = Key(
        q.device.type,
        q.dtype,
        kv.dtype,
        q.shape[2],
        q.shape[1] // kv.shape[2],
        batch.block_size,
        window is not None,
        softcap is not None,
    )
    return PAGED_ATTENTION.resolve(key)(q, kv, batch, scale, window, softcap, kv_scales)
