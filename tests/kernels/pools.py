"""Scales for pools of K and V in tests."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.ops.kv_format import KV_FORMATS, KV_SCALE_DTYPE, num_kv_groups


def nan_scales(kv: Tensor) -> Tensor | None:
    """Scales for a pool [..., D] of 8 bits, all NaN; None for another pool."""
    if kv.dtype not in KV_FORMATS:
        return None
    return torch.full((*kv.shape[:-1], num_kv_groups(kv.shape[-1])), float("nan"), dtype=KV_SCALE_DTYPE)
