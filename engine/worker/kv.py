"""The KV pool: one tensor for all layers, laid out so that one head's part of a block is contiguous. A pool in 8 bits
(`kernels/ops/kv_format`) has a second tensor for scales.

A block belongs to one cache group at a time. Layer i of the group uses plane i; the largest group uses all planes. If
layers have different heads, a block's planes have the shape of the largest, and smaller layers share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.arch.sharding import ONE_RANK, Rank
from inferd.engine.worker.device import Device
from inferd.kernels.ops.kv_format import KV_FORMATS, KV_SCALE_DTYPE, num_kv_groups


@dataclass(frozen=True, slots=True)
class KVPool:
    """Keys and values of every block."""

    data: Tensor
    """[planes, blocks, 2 (k, v), kv heads, block_size, head_dim], with the KV heads of this rank."""
    padding_block: int | None = None
    """Block that padding rows write to and no request has; None if the device does not pad steps."""
    scales: Tensor | None = None
    """[planes, blocks, 2, kv heads, block_size, groups]: factors of the groups of each head of a token; None unless
    `data` has 8 bits."""

    @classmethod
    def allocate(
        cls, arch: Arch, num_blocks: int, block_size: int, dtype: torch.dtype, device: Device, rank: Rank = ONE_RANK
    ) -> KVPool:
        """A pool of `num_blocks` for requests, and one more block if the device pads steps. K and V are in `dtype`."""
        num_planes = max(group.num_planes for group in arch.cache_groups)
        heads = arch.widest_heads
        pads = len(device.row_buckets) < device.row_buckets[-1]
        first_head, end_head = rank.kv_heads(heads)
        shape = (num_planes, num_blocks + pads, 2, end_head - first_head, block_size)
        scales = None
        if dtype in KV_FORMATS:
            scales = device.empty_pool((*shape, num_kv_groups(heads.head_dim)), KV_SCALE_DTYPE)
        data = device.empty_pool((*shape, heads.head_dim), dtype)
        return cls(data, num_blocks if pads else None, scales)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)
