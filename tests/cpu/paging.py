"""A KV pool and block tables for tests: every block has a random place, and every slot is NaN until it is written.

Table entries behind a cache group's window name a block that is never written. So a kernel that uses them gives NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from inferd.engine.arch.paging import num_dead_blocks
from inferd.engine.layers.recurrent import States
from inferd.engine.models.decoder import Decoder
from inferd.kernels.ops.kv_format import is_smoothed
from inferd.kernels.ops.paged_attention import AttentionBatch
from inferd.kernels.ops.states import StateRows
from tests.kernels.pools import nan_scales

_NUM_STATES = 40


@dataclass(eq=False)
class Request:
    """One request's ids and the blocks that hold their KV. The pool holds `computed` of them."""

    token_ids: list[int]
    blocks: list[tuple[int, ...]] = field(default_factory=list)
    """For each `block_size` positions a block for each cache group."""
    computed: int = 0
    slot: int | None = None
    """Place of its recurrent state, if the model has one; None before its first step."""


class Pool:
    """Runs steps of a decoder over requests of its own. `num_blocks` is the number of blocks of one cache group.

    `table_width` is the width of the block tables, which an engine fixes; None: as wide as the longest request needs. K
    and V are in `kv_dtype`; None: in the decoder's dtype.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int,
        block_size: int = 16,
        seed: int = 0,
        table_width: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        arch = decoder.arch
        self.groups = arch.cache_groups
        num_planes, heads = max(group.num_planes for group in self.groups), arch.widest_heads
        num_blocks = num_blocks * len(self.groups) + 1
        first_head, end_head = decoder.rank.kv_heads(heads)
        shape = (num_planes, num_blocks, 2, end_head - first_head, block_size, heads.head_dim)
        self.decoder, self.block_size, self.table_width = decoder, block_size, table_width
        self.kv = torch.full(shape, float("nan")).to(kv_dtype or decoder.dtype)
        self.kv_scales = nan_scales(self.kv)
        if is_smoothed(self.kv.dtype):
            decoder.smooth_keys()
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.never_written = self.free.pop()
        self.states: States | None = None
        self._num_slots = 0
        if arch.recurrent is not None:
            recurrent, places = arch.recurrent, (len(arch.recurrent_layers), _NUM_STATES)
            matrices = (*places, *recurrent.state_shape)
            inputs = (*places, recurrent.conv_width - 1, recurrent.conv_size)
            no_rows = StateRows(torch.zeros(1, dtype=torch.int32), *torch.zeros(2, 0, dtype=torch.int64))
            nan = float("nan")
            self.states = States(no_rows, torch.full(matrices, nan), torch.full(inputs, nan).to(decoder.dtype))

    def step(self, rows: Sequence[tuple[Request, int]]) -> list[Tensor]:
        """Compute the next `count` tokens of each (sequence, count). Returns each row's hidden states."""
        self.extend(rows)
        spans = [(sequence.computed, count) for sequence, count in rows]
        batches = [
            AttentionBatch.build(spans, self.tables(rows, group), self.block_size, "cpu")
            for group in range(len(self.groups))
        ]
        ids = [sequence.token_ids[sequence.computed : sequence.computed + count] for sequence, count in rows]
        token_ids = torch.tensor([token_id for row in ids for token_id in row])
        if self.states is not None:
            rows_of_states = StateRows(batches[0].query_start, batches[0].positions, self.slots_of(rows))
            self.states = replace(self.states, rows=rows_of_states)
        hidden = self.forward(token_ids, batches)
        for sequence, count in rows:
            sequence.computed += count
        return list(torch.split(hidden, [count for _, count in rows]))

    def slots_of(self, rows: Sequence[tuple[Request, int]]) -> Tensor:
        """The places of the rows' states."""
        for sequence, _ in rows:
            if sequence.slot is None:
                sequence.slot, self._num_slots = self._num_slots, self._num_slots + 1
        return torch.tensor([sequence.slot for sequence, _ in rows])

    def extend(self, rows: Sequence[tuple[Request, int]]) -> None:
        """Give each request the blocks that it lacks for its next tokens."""
        for sequence, count in rows:
            while len(sequence.blocks) * self.block_size < sequence.computed + count:
                sequence.blocks.append(tuple(self.free.pop() for _ in self.groups))

    def forward(self, token_ids: Tensor, batches: Sequence[AttentionBatch]) -> Tensor:
        """Hidden states [T, hidden]. Subclasses compute them in other ways."""
        return self.decoder.forward(token_ids, batches, self.kv, self.kv_scales, self.states)

    def tables(self, rows: Sequence[tuple[Request, int]], group: int) -> Tensor:
        """[R, blocks] int32, the block tables of one cache group."""
        width = self.table_width or max(len(sequence.blocks) for sequence, _ in rows)
        tables = torch.full((len(rows), width), -1, dtype=torch.int32)
        for row, (sequence, _) in enumerate(rows):
            blocks = [blocks[group] for blocks in sequence.blocks]
            num_dead = num_dead_blocks(self.groups[group].window, sequence.computed, self.block_size)
            seen = [self.never_written] * num_dead + blocks[num_dead:]
            tables[row, : len(blocks)] = torch.tensor(seen, dtype=torch.int32)
        return tables


def prompt_logits(
    decoder: Decoder, token_ids: Sequence[int], chunks: Sequence[int], kv_dtype: torch.dtype | None = None
) -> Tensor:
    """[len(token_ids), vocab] of one sequence, computed in `chunks`, which must add up to its length."""
    sequence = Request(list(token_ids))
    pool = Pool(decoder, num_blocks=-(-len(token_ids) // 16) + 3, kv_dtype=kv_dtype)
    return torch.cat([decoder.logits(pool.step([(sequence, count)])[0]) for count in chunks])
