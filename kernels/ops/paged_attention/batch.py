"""Metadata of one step's attention: its queries, their block tables, and the groups in which the CPU computes them.

Built once per step and shared by all layers. Row r of the step is request r of its batch order; T is the number of
query tokens, R of rows. Nothing here knows heads, windows or dtypes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from inferd.kernels.cpu.tape import NotRecordableError
from inferd.kernels.gpu import from_host

ATTENTION_SPLIT = 256
"""KV tokens per tile, a multiple of every block size. Tiles lie at absolute multiples of it and are combined in order
for every kind of query, so a result's bits depend on its own sequence alone. 256 halves the Python overhead per token
of 128, and a lone short decode is still bound by its linears (2 cores, Zen 4)."""

QUERY_BLOCK = 128
"""Most query tokens computed together: 8 heads x 4 x 128 queries x a tile make 4 MiB of scores, about a core's cache.
"""

ROWS_PER_GROUP = 16
"""Most requests computed together: a tile of K and V with 8 heads of 128 then takes 32 MiB in fp32."""


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """B runs of n consecutive queries each, one run per request. Runs that see most KV come first."""

    tokens: Tensor
    """[B * n] int64, index into the step's T tokens."""
    positions: Tensor
    """[B, n] int64, absolute positions."""
    tile_tables: Tensor
    """[B, tiles of the first run * blocks per tile] int64. Entries past a request's own blocks hold any valid id."""
    first_positions: tuple[int, ...]
    """Position of each run's first query."""
    num_tiles: tuple[int, ...]
    """Tiles that each run sees; never increases."""


@dataclass(frozen=True)
class AttentionBatch:
    """Queries of T tokens in R rows over a paged KV pool."""

    query_start: Tensor
    """[R + 1] int32: row r's tokens are query_start[r] .. query_start[r + 1]."""
    seq_lens: Tensor
    """[R] int32: KV length of each row, this step's tokens included."""
    block_tables: Tensor
    """[R, max_blocks] int32 or int64; entries past a row's last block are never read for their content."""
    positions: Tensor
    """[T] int64: absolute position of each token."""
    write_slots: Tensor
    """[T] int64: block_id * block_size + offset of each token's K and V."""
    block_size: int
    query_lens: tuple[int, ...]
    """Queries of each row, if the host knows them. Else numbers of queries for which as many blocks must be launched as
    for those in `query_start`, or more."""
    host_seq_lens: tuple[int, ...] | None
    """The same on the host; None if only the device knows them, as of a step that is recorded."""
    is_deterministic: bool = True
    """Whether a row's bits must depend on its own sequence alone. If they need not, a GPU adds up a sequence's keys in
    fewer parts, which the other rows of the step decide (`parts.py`)."""
    knows_query_lens: bool = True
    """Whether `query_lens` are the rows' own or bounds of them."""

    @property
    def is_recorded(self) -> bool:
        """Whether the step is recorded, so that only the device knows its lengths."""
        return self.host_seq_lens is None

    @cached_property
    def is_decode(self) -> bool:
        """Whether each row has exactly one query: that of row r is token r."""
        return self.knows_query_lens and max(self.query_lens) == 1

    @cached_property
    def prepared(self) -> dict[Hashable, Any]:
        """Data that an implementation prepared for all layers of this step, by keys of its own. The first layer
        prepares it. A CUDA graph captures that work, so a captured call needs a batch that no earlier call used."""
        return {}

    @cached_property
    def page_table(self) -> Tensor:
        """[R, max_blocks] int32, for libraries, which may read entries behind a row's last block: they repeat that
        block here. Entries that a window has left behind may be any block id. The first layer that asks makes it, like
        `prepared`."""
        last = (self.seq_lens.clamp(min=1) - 1) // self.block_size
        entries = torch.arange(self.block_tables.shape[1], device=last.device)
        own = torch.minimum(entries, last[:, None])
        return self.block_tables.gather(1, own).clamp(min=0).to(torch.int32)

    @cached_property
    def groups(self) -> tuple[QueryGroup, ...]:
        """Groups of queries, made at the first request: only the plain PyTorch reference needs them. Raises
        `NotRecordableError` if the host does not know the lengths."""
        if self.host_seq_lens is None:
            raise NotRecordableError("attention in plain PyTorch needs lengths that only the device knows")
        lens = zip(self.host_seq_lens, self.query_lens, strict=True)
        rows = [(seq_len - num_tokens, num_tokens) for seq_len, num_tokens in lens]
        starts = [0, *accumulate(self.query_lens)]
        return _group(rows, starts, self.block_tables, self.block_size)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @classmethod
    def build(
        cls,
        rows: Sequence[tuple[int, int]],
        block_tables: Tensor,
        block_size: int,
        device: torch.device | str,
        *,
        is_deterministic: bool = True,
    ) -> AttentionBatch:
        """Metadata of `rows`, each (absolute position of its first token, number of tokens >= 1).

        `block_tables` [R, max_blocks], integer, on `device`: entry i of row r is the block of positions
        i * block_size .. (i + 1) * block_size. Unused entries may hold -1 or any block id.
        """
        assert rows and block_tables.shape[0] == len(rows)
        assert ATTENTION_SPLIT % block_size == 0, f"{ATTENTION_SPLIT} is no multiple of block size {block_size}"
        starts = [start for start, _ in rows]
        lens = [num_tokens for _, num_tokens in rows]
        assert min(starts) >= 0 and min(lens) >= 1
        host_seq_lens = [start + num_tokens for start, num_tokens in rows]
        assert max(host_seq_lens) <= block_tables.shape[1] * block_size, "a row is longer than its block table"
        query_start = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor(lens), 0, out=query_start[1:])
        row_of_token = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lens), output_size=sum(lens))
        positions = torch.arange(len(row_of_token)) + (torch.tensor(starts) - query_start[:-1])[row_of_token]
        parts = (positions, query_start, torch.tensor(host_seq_lens), row_of_token)
        positions, query_start, seq_lens, row_of_token = _on_device(parts, torch.device(device))
        block_ids = block_tables[row_of_token, positions // block_size].to(torch.int64)
        return cls(
            query_start=query_start.to(torch.int32),
            seq_lens=seq_lens.to(torch.int32),
            block_tables=block_tables,
            positions=positions,
            write_slots=block_ids * block_size + positions % block_size,
            block_size=block_size,
            query_lens=tuple(lens),
            host_seq_lens=tuple(host_seq_lens),
            is_deterministic=is_deterministic,
        )


def _on_device(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Copy the host's tensors to `device` as one tensor, without waiting. Kernels are compiled by whether an address is
    a multiple of 16. The first address always is, and kernels get no other."""
    return torch.split(from_host(torch.cat(tuple(parts)), device), [len(part) for part in parts])


@dataclass(frozen=True, slots=True)
class _Run:
    """At most `QUERY_BLOCK` consecutive queries of one row."""

    row: int
    token: int
    position: int
    num_queries: int

    @property
    def num_tiles(self) -> int:
        return (self.position + self.num_queries - 1) // ATTENTION_SPLIT + 1


def _group(
    rows: Sequence[tuple[int, int]], query_start: Sequence[int], block_tables: Tensor, block_size: int
) -> tuple[QueryGroup, ...]:
    by_length: dict[int, list[_Run]] = defaultdict(list)
    for row, (start, num_tokens) in enumerate(rows):
        for done in range(0, num_tokens, QUERY_BLOCK):
            num_queries = min(QUERY_BLOCK, num_tokens - done)
            by_length[num_queries].append(_Run(row, query_start[row] + done, start + done, num_queries))
    groups = []
    for num_queries, runs in by_length.items():
        runs.sort(key=lambda run: -run.num_tiles)
        rows_per_group = min(ROWS_PER_GROUP, max(1, QUERY_BLOCK // num_queries))
        for first in range(0, len(runs), rows_per_group):
            groups.append(_make_group(runs[first : first + rows_per_group], block_tables, block_size))
    return tuple(groups)


def _make_group(runs: Sequence[_Run], block_tables: Tensor, block_size: int) -> QueryGroup:
    device = block_tables.device
    within = torch.arange(runs[0].num_queries, device=device)
    tokens = torch.tensor([run.token for run in runs], device=device)[:, None] + within
    positions = torch.tensor([run.position for run in runs], device=device)[:, None] + within
    width = runs[0].num_tiles * (ATTENTION_SPLIT // block_size)
    tables = block_tables[torch.tensor([run.row for run in runs], device=device), :width].to(torch.int64).clamp_(min=0)
    return QueryGroup(
        tokens=tokens.flatten(),
        positions=positions,
        tile_tables=torch.nn.functional.pad(tables, (0, width - tables.shape[1])),
        first_positions=tuple(run.position for run in runs),
        num_tiles=tuple(run.num_tiles for run in runs),
    )
