"""Random KV for a decoder. Other pages hold arbitrary data, like a used pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.models import BLOCK_SIZE
from inferd.engine.models.decoder import Decoder
from inferd.kernels.ops.paged_attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class Pages:
    """A pool of `num_rows` sequences and one padding block."""

    kv: Tensor
    """[planes, blocks, 2, KV heads, block size, head size] in the decoder's dtype."""
    tables: Tensor
    """[cache groups, rows, blocks] int32."""

    @classmethod
    def make(cls, decoder: Decoder, num_rows: int, length: int) -> Pages:
        """Pages for sequences of up to `length` tokens."""
        arch, device = decoder.arch, decoder.device
        width, num_groups = -(-length // BLOCK_SIZE), len(arch.cache_groups)
        num_planes, heads = max(group.num_planes for group in arch.cache_groups), arch.widest_heads
        shape = (num_planes, num_groups * num_rows * width + 1, 2, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim)
        blocks = torch.arange(num_groups * num_rows * width, device=device, dtype=torch.int32)
        return cls(torch.randn(shape, device=device).to(decoder.dtype), blocks.reshape(num_groups, num_rows, width))

    @property
    def padding_block(self) -> int:
        """A block of no sequence."""
        return self.kv.shape[1] - 1

    def batches(
        self,
        spans: Sequence[tuple[int, int]],
        order: Sequence[int] | None = None,
        *,
        is_deterministic: bool = True,
    ) -> list[AttentionBatch]:
        """Batches of spans (start, tokens), one for each cache group. `order` names the rows whose tables they take, by
        default the first."""
        rows = list(range(len(spans)) if order is None else order)
        return [
            AttentionBatch.build(spans, tables[rows], BLOCK_SIZE, tables.device, is_deterministic=is_deterministic)
            for tables in self.tables
        ]
