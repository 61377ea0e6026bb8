"""Calls the C++ implementation (`cpu.cpp`), for the cases that it supports."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops.kv_format import kv_code, refuses_kv

_MAX_HEAD_DIM = 512
"""A head is held on the stack."""


def refuses(device_type: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> str | None:
    """Why it cannot run; None if it can."""
    if head_dim > _MAX_HEAD_DIM:
        return f"takes heads of at most {_MAX_HEAD_DIM}, not {head_dim}"
    return refuses_kv(dtype, kv_dtype) or native.refuses(device_type, dtype)


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    write_slots: Tensor,
    kv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv_scales: Tensor | None,
    norms_v: bool,
    smoothing: Tensor | None,
) -> Tensor:
    k, v = (_with_heads_together(heads) for heads in (k, v))
    assert q.stride(2) == 1
    assert all(norm is None or norm.is_contiguous() for norm in (q_norm, k_norm))
    assert q_norm is None or q_norm.dtype in (q.dtype, torch.float32)
    assert positions.is_contiguous() and write_slots.is_contiguous() and cos_sin.is_contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    native.function("inferd_rope_and_cache")(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        cos_sin.data_ptr(),
        positions.data_ptr(),
        write_slots.data_ptr(),
        kv.data_ptr(),
        0 if kv_scales is None else kv_scales.data_ptr(),
        out.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        0 if smoothing is None else smoothing.data_ptr(),
        q.shape[0],
        q.shape[1],
        k.shape[1],
        1 if smoothing is None else q.shape[1] // smoothing.shape[1],
        q.shape[2],
        cos_sin.shape[1],
        kv.shape[3],
        q.stride(0),
        k.stride(0),
        v.stride(0),
        q.stride(1),
        kv.stride(0),
        0 if kv_scales is None else kv_scales.stride(0),
        eps,
        norms_v,
        native.DTYPE_CODES[q.dtype],
        native.DTYPE_CODES[q.dtype if q_norm is None else q_norm.dtype],
        kv_code(kv.dtype),
        torch.get_num_threads(),
    )
    return out


def _with_heads_together(heads: Tensor) -> Tensor:
    """[T, H, D] with the heads of one token side by side, as a projection's output has them."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()
