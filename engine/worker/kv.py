"""The KV pool: one tensor for all layers, laid out so that one head's page is contiguous, and of scales beside 8 bits.

A block belongs to one cache group at a time, whose layer number i has plane i of it; the largest group has them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.worker.device import Device


@dataclass(frozen=True, slots=True)
class KVPool:
    """Keys and values of every block."""

    data: Tensor
    """[planes, blocks, 2 (k, v), kv heads, block_size, head_dim]."""
    padding_block: int | None = None
    """A block that is no request's, where the device pads steps."""
    scales: Tensor | None = None
    """[planes, blocks, 2, kv heads, block_size] fp32 where `data` is of 8 bits: what a head of a token is multiplied
    by."""

    @classmethod
    def allocate(cls, arch: Arch, num_blocks: int, block_size: int, dtype: torch.dtype, device: Device) -> KVPool:
        """`num_blocks` that requests can have, and one more where the device pads steps. `dtype` is that of K and V."""
        num_planes = max(len(group.layers) for group in arch.cache_groups)
        pads = len(device.row_buckets) < device.row_buckets[-1]
        shape = (num_planes, num_blocks + pads, 2, arch.num_kv_heads, block_size)
        scales = device.empty_pool(shape, torch.float32) if dtype == torch.float8_e4m3fn else None
        data = device.empty_pool((*shape, arch.head_dim), dtype)
        return cls(data, num_blocks if pads else None, scales)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def block_size(self) -> int:
        return self.data.shape[4]
