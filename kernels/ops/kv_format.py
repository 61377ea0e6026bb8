"""Formats of 8 bits in a KV pool, and their plain PyTorch. `kv_numbers.h` holds them for C++.

A group of consecutive elements of a head has a scale. An element is its number times the scale of its group, which
float32 holds exactly. Another format is one entry of `KV_FORMATS` and one struct in C++.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KV_GROUP = 32
"""Elements that share a scale. The last group of a head may have fewer."""
KV_SCALE_DTYPE = torch.bfloat16
MIN_SCALE, MAX_SCALE = 2.0**-100, 2.0**100
"""Smallest and largest scale. Elements whose scale would be larger, infinity and NaN make it NaN."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Numbers of 8 bits."""

    code: int
    """Number of the format in the kernels' C interface."""
    most: float
    """Largest magnitude of a number."""
    is_integer: bool = False


KV_FORMATS = {torch.float8_e4m3fn: KVFormat(1, 448.0), torch.int8: KVFormat(2, 127.0, is_integer=True)}


def is_smoothed(dtype: torch.dtype) -> bool:
    """Whether a pool of this dtype gains from channels of K that are alike in size. Integers do. Floats lose: their
    error is a share of each number, except of the largest of a group, which is nearly exact. It is better kept so."""
    return dtype in KV_FORMATS and KV_FORMATS[dtype].is_integer


def kv_code(dtype: torch.dtype) -> int:
    """Number of a pool's dtype in the kernels' C interface; 0 is the dtype of the queries."""
    return KV_FORMATS[dtype].code if dtype in KV_FORMATS else 0


def num_kv_groups(head_dim: int) -> int:
    return -(-head_dim // KV_GROUP)


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a head of K, or of V, of one token in a pool of `dtype`."""
    scales = num_kv_groups(head_dim) * KV_SCALE_DTYPE.itemsize if dtype in KV_FORMATS else 0
    return head_dim * dtype.itemsize + scales


def check_scales(kv: Tensor, kv_scales: Tensor | None) -> None:
    """Exactly a pool of 8 bits has scales."""
    assert (kv_scales is not None) == (kv.dtype in KV_FORMATS)
    if kv_scales is not None:
        assert kv_scales.shape == (*kv.shape[:4], num_kv_groups(kv.shape[4]))
        assert kv_scales.dtype == KV_SCALE_DTYPE and (kv_scales.is_contiguous() or kv_scales[0].is_contiguous())


def refuses_kv(dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """Why no kernel of queries in `dtype` has K and V in `kv_dtype`; None if it can."""
    if kv_dtype == dtype or kv_dtype in KV_FORMATS:
        return None
    return f"takes K and V in the dtype of the queries or in 8 bits, not {kv_dtype} for {dtype}"


def quantize_heads(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(numbers in `dtype` [..., D], scales [..., groups]) of heads [..., D]."""
    form, wide = KV_FORMATS[dtype], _groups(heads.to(torch.float32))
    scales = (wide.abs().amax(-1) * (1.0 / form.most)).clamp(min=MIN_SCALE)
    scales = scales.masked_fill(~(scales <= MAX_SCALE), float("nan")).to(KV_SCALE_DTYPE)
    numbers = wide * (1.0 / scales.to(torch.float32)).unsqueeze(-1)
    if form.is_integer:
        numbers = numbers.nan_to_num(0.0).round()
    return numbers.flatten(-2)[..., : heads.shape[-1]].to(dtype), scales


def dequantize_heads(numbers: Tensor, scales: Tensor) -> Tensor:
    """Heads [..., D] in float32."""
    wide = _groups(numbers.to(torch.float32)) * scales.to(torch.float32).unsqueeze(-1)
    return wide.flatten(-2)[..., : numbers.shape[-1]]


def _groups(heads: Tensor) -> Tensor:
    """[..., D] -> [..., groups, KV_GROUP], with zeros behind a head's end."""
    padded = torch.nn.functional.pad(heads, (0, -heads.shape[-1] % KV_GROUP))
    return torch.unflatten(padded, -1, (-1, KV_GROUP))
