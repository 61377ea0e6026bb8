"""Calls the C++ implementation (`cpu.cpp`), for the cases that it supports."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops.kv_format import kv_code, refuses_kv
from inferd.kernels.ops.paged_attention.batch import AttentionBatch

_MAX_HEADS_PER_KV_HEAD = 64
"""Most rows that `cpu.cpp` holds at once."""
_BLOCK_MULTIPLE = 16
"""Keys that are loaded together; all of them must lie in one page."""


def refuses(
    device_type: str, dtype: torch.dtype, kv_dtype: torch.dtype, heads_per_kv_head: int, block_size: int
) -> str | None:
    """Why it cannot run; None if it can."""
    if block_size % _BLOCK_MULTIPLE:
        return f"takes block sizes that are multiples of {_BLOCK_MULTIPLE}, not {block_size}"
    if heads_per_kv_head > _MAX_HEADS_PER_KV_HEAD:
        return f"takes at most {_MAX_HEADS_PER_KV_HEAD} query heads a KV head, not {heads_per_kv_head}"
    return refuses_kv(dtype, kv_dtype) or native.refuses(device_type, dtype)


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
    assert q.is_contiguous()
    out = torch.empty_like(q)
    tables = batch.block_tables.to(torch.int32).contiguous()
    native.function("inferd_paged_attention")(
        q.data_ptr(),
        kv.data_ptr(),
        0 if kv_scales is None else kv_scales.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        batch.query_start.data_ptr(),
        batch.seq_lens.data_ptr(),
        tables.data_ptr(),
        len(batch.query_lens),
        tables.shape[1],
        q.shape[1],
        kv.shape[2],
        q.shape[2],
        batch.block_size,
        kv.stride(0),
        0 if kv_scales is None else kv_scales.stride(0),
        window or 0,
        scale,
        softcap or 0.0,
        native.DTYPE_CODES[q.dtype],
        kv_code(kv.dtype),
        torch.get_num_threads(),
    )
    return out
