"""The KV pool: one tensor for all layers, laid out so that one head's page is contiguous."""

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
    """[layers, blocks, 2 (k, v), kv heads, block_size, head_dim]."""

    @classmethod
    def allocate(cls, arch: Arch, num_blocks: int, block_size: int, dtype: torch.dtype, device: Device) -> KVPool:
        shape = (arch.num_layers, num_blocks, 2, arch.num_kv_heads, block_size, arch.head_dim)
        return cls(device.empty_pool(shape, dtype))

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    @property
    def block_size(self) -> int:
        return self.data.shape[4]
