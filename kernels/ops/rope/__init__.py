"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) fused with its neighbours in an attention layer.

q and k are optionally RMS-normalised per head and rotated by their absolute positions; k and v are written into the
paged KV pool. Pairs are (i, i + r/2) within the first r elements of a head, as Hugging Face checkpoints expect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.ops.kv_format import check_scales, refuses_kv
from inferd.kernels.ops.rope import cpu, reference
from inferd.kernels.registry import ROWS_SHARE_SUMS, Deferred, Implementation, Op, always

_MAX_TRITON_HEAD_DIM = 512
"""8 heads are 4096 elements, 16 a thread of 8 warps."""


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    has_qk_norm: bool
    norms_v: bool = False


def _refuses_triton(key: Key) -> str | None:
    if key.norms_v:
        return "does not norm v"
    if key.head_dim > _MAX_TRITON_HEAD_DIM:
        return f"takes heads of at most {_MAX_TRITON_HEAD_DIM}, not {key.head_dim}"
    return refuses_kv(key.dtype, key.kv_dtype) or gpu.refuses(key.device_type, key.dtype, key.kv_dtype)


Run = Callable[
    [
        Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float, Tensor | None,
        bool, Tensor | None,
    ],
    Tensor,
]  # fmt: skip
ROPE_AND_CACHE: Op[Key, Run] = Op(
    "rope_and_cache",
    [
        Implementation(
            "cpp", cpu.rope_and_cache, lambda key: cpu.refuses(key.device_type, key.dtype, key.kv_dtype, key.head_dim)
        ),
        Implementation("triton", Deferred(f"{__name__}.triton", "rope_and_cache"), _refuses_triton),
        Implementation("reference", reference.rope_and_cache, always, varies=ROWS_SHARE_SUMS),
    ],
)


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    write_slots: Tensor,
    kv: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    kv_scales: Tensor | None = None,
    *,
    norms_v: bool = False,
    smoothing: Tensor | None = None,
) -> Tensor:
    """Rotate q and return it; rotate k and write it, with v, into `kv`.

    q [T, Hq, D]; k, v [T, G, D]; cos_sin [P, r] fp32, a position's r/2 cosines and then its r/2 sines, r <= D even;
    positions [T] int64, below P; write_slots [T] int64, block_id * block_size + offset, no two alike; kv [blocks, 2, G,
    block_size, D], written in place, in q's dtype or in 8 bits; q_norm, k_norm [D], both or neither, with their `eps`.
    Each block is contiguous; on a CPU blocks may lie apart. `norms_v`: each head of v is divided by its RMS, with
    `eps`. If k and v have no heads, q is rotated and nothing is written. Arithmetic is in fp32, with one rounding to
    the dtype at the end, ties to even.

    Exactly a pool of 8 bits (`kv_format`) has `kv_scales` [blocks, 2, G, block_size, groups], written in place. A
    group's scale is its largest magnitude divided by the format's largest number, rounded to bfloat16. The group's
    elements are divided by the rounded scale, and then rounded.

    `smoothing` [2, KV heads that q reads, D] fp32, powers of two: rotated q is multiplied by the first half, each head
    by the numbers of the KV head that it reads, and rotated k by the second half. So elements of a group can be made
    alike in size.
    """
    assert k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1]
    assert cos_sin.dtype == torch.float32 and cos_sin.shape[-1] % 2 == 0 and cos_sin.shape[-1] <= q.shape[-1]
    assert kv.shape[1] == 2 and (kv.shape[2] == k.shape[1] or not k.shape[1])
    assert kv.shape[4] == k.shape[2]
    assert kv.is_contiguous() or kv[0].is_contiguous()
    assert (q_norm is None) == (k_norm is None)
    check_scales(kv, kv_scales)
    if smoothing is not None:
        assert smoothing.dtype == torch.float32 and smoothing.is_contiguous()
        assert smoothing.shape[0] == 2 and smoothing.shape[2] == q.shape[2] and q.shape[1] % smoothing.shape[1] == 0
        assert not k.shape[1] or smoothing.shape[1] == k.shape[1]
    run = ROPE_AND_CACHE.resolve(Key(q.device.type, q.dtype, kv.dtype, q.shape[-1], q_norm is not None, norms_v))
    return run(q, k, v, cos_sin, positions, write_slots, kv, q_norm, k_norm, eps, kv_scales, norms_v, smoothing)
