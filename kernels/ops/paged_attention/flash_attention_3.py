"""Paged attention by FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), a wheel that is installed beside inferd.
Written against flash_attn_interface 3.0.0; no GPU has run it yet.

K and V are [blocks, block_size, G, D], views of the pool. The library reads lengths on the device. It aligns the causal
mask to a row's last query and last key, and takes a window as the number of positions before a query's own.

It multiplies V of hidden positions by 0. So a NaN behind a row's end makes results NaN, if whole blocks are loaded. The
pool begins as zeros: such a NaN is that of an earlier request.
"""

from __future__ import annotations

from flash_attn_interface import flash_attn_with_kvcache
from torch import Tensor

from inferd.kernels.ops.paged_attention.batch import AttentionBatch
from inferd.kernels.ops.paged_attention.passes import FEW_ROWS, SLOT_BYTES

_MAX_SPLITS = 32
"""Most parts that a sequence's keys are cut into. The library allocates the partial results of all of them."""


def paged_attention(
    q: Tensor,
    kv: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    kv_scales: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    assert kv_scales is None and sinks is None
    k, v = kv.transpose(2, 3).unbind(1)
    out: Tensor = flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=batch.seq_lens,
        page_table=batch.page_table,
        cu_seqlens_q=batch.query_start,
        max_seqlen_q=max(batch.query_lens),
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
        num_splits=num_splits(q, batch, kv.shape[2]),
    )
    return out


def num_splits(q: Tensor, batch: AttentionBatch, num_kv_heads: int) -> int:
    """Most parts of a sequence's keys. The library chooses fewer by the lengths on the device. A step with a chunk has
    enough blocks of queries, so nothing is cut."""
    num_tokens, num_heads, head_dim = q.shape
    if max(batch.query_lens) * num_heads // num_kv_heads > FEW_ROWS:
        return 1
    return max(1, min(_MAX_SPLITS, SLOT_BYTES // (num_tokens * num_heads * (head_dim + 1) * 4)))
