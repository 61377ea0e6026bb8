"""A KV pool and block tables for tests: every block at a random place, every slot NaN until it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inferd.engine.models.decoder import Decoder
from inferd.kernels.paged_attention import AttentionBatch


@dataclass(eq=False)
class Request:
    """One request's ids and the blocks that hold their KV; `computed` of them are in the pool."""

    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Pool:
    """Runs steps of a decoder over requests of its own."""

    def __init__(self, decoder: Decoder, num_blocks: int, block_size: int = 16, seed: int = 0) -> None:
        arch = decoder.arch
        shape = (arch.num_layers, num_blocks, 2, arch.num_kv_heads, block_size, arch.head_dim)
        self.decoder, self.block_size = decoder, block_size
        self.kv = torch.full(shape, float("nan"), dtype=decoder.dtype)
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()

    def step(self, rows: Sequence[tuple[Request, int]]) -> list[Tensor]:
        """Compute the next `count` tokens of each (sequence, count); returns each row's hidden states."""
        for sequence, count in rows:
            while len(sequence.blocks) * self.block_size < sequence.computed + count:
                sequence.blocks.append(self.free.pop())
        width = max(len(sequence.blocks) for sequence, _ in rows)
        tables = torch.tensor([sequence.blocks + [-1] * (width - len(sequence.blocks)) for sequence, _ in rows])
        spans = [(sequence.computed, count) for sequence, count in rows]
        batch = AttentionBatch.build(spans, tables, self.block_size, "cpu")
        ids = [sequence.token_ids[sequence.computed : sequence.computed + count] for sequence, count in rows]
        token_ids = torch.tensor([token_id for row in ids for token_id in row])
        hidden = self.decoder.forward(token_ids, batch, self.kv)
        for sequence, count in rows:
            sequence.computed += count
        return list(torch.split(hidden, [count for _, count in rows]))


def prompt_logits(decoder: Decoder, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """[len(token_ids), vocab] of one sequence, computed in `chunks`, which add up to its length."""
    sequence = Request(list(token_ids))
    pool = Pool(decoder, num_blocks=-(-len(token_ids) // 16) + 3)
    return torch.cat([decoder.logits(pool.step([(sequence, count)])[0]) for count in chunks])
