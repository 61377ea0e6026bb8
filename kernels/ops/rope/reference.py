"""Rotary embedding, optional RMS norm per head, and the write of k and v into the paged pool, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.ops.kv_format import quantize_heads
from inferd.kernels.ops.rms_norm import reference_rms_norm


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
    dtype = q.dtype
    if q_norm is not None and k_norm is not None:
        q = reference_rms_norm(q.to(torch.float32), q_norm, eps)
        k = reference_rms_norm(k.to(torch.float32), k_norm, eps)
    if norms_v:
        v = reference_rms_norm(v.to(torch.float32), v.new_ones(v.shape[-1], dtype=torch.float32), eps)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    rotated, keys = _rotate(q, cos, sin), _rotate(k, cos, sin)
    if smoothing is not None:
        rotated = rotated * smoothing[0].repeat_interleave(q.shape[1] // smoothing.shape[1], 0)
        keys = keys * smoothing[1] if k.shape[1] else keys
    if not k.shape[1]:
        return rotated.to(dtype)
    block_size = kv.shape[3]
    block_ids, offsets = write_slots // block_size, write_slots % block_size
    for plane, heads in enumerate((keys, v)):
        if kv_scales is None:
            kv[block_ids, plane, :, offsets] = heads.to(kv.dtype)
        else:
            numbers, scales = quantize_heads(heads, kv.dtype)
            kv[block_ids, plane, :, offsets], kv_scales[block_ids, plane, :, offsets] = numbers, scales
    return rotated.to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + r/2]) of the first r elements of each head, in fp32; cos, sin [T, 1, r/2]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rest.shape[-1]:
        parts.append(rest.to(torch.float32))
    return torch.cat(parts, dim=-1)
