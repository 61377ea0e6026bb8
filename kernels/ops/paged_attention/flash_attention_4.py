"""Paged attention by FlashAttention-4, a package that is installed beside inferd. Written against version 4.0.0b36 of
flash-attn-4, which compiles these calls for compute capability 9.0. No GPU has run it yet.

Its arguments mean what those of FlashAttention-3 mean (`flash_attention_3.py`), and a NaN behind a row's end has the
same effect. It compiles a kernel for each kind of step, not for each shape.
"""

from __future__ import annotations

from flash_attn.cute.interface import flash_attn_varlen_func
from torch import Tensor

from inferd.kernels.ops.paged_attention.batch import AttentionBatch


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
    """It cuts no sequence: on compute capability 9.0 the library cannot."""
    assert kv_scales is None and sinks is None
    k, v = kv.transpose(2, 3).unbind(1)
    out: Tensor = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=batch.query_start,
        max_seqlen_q=max(batch.query_lens),
        seqused_k=batch.seq_lens,
        page_table=batch.page_table,
        softmax_scale=scale,
        causal=True,
        window_size=(None, None) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
    )[0]
    return out
