"""Attention over a paged KV pool in plain PyTorch: tiles of KV at absolute positions, online softmax, everything in
fp32. K and V in 8 bits are rounded to the dtype of the queries.

A query's bits depend on its own sequence alone, for these reasons (measured: torch 2.13 with MKL 2024.2, limited to SSE
4.2, AVX2 and AVX-512 on an Intel Xeon, 1 to 8 threads, 2026-11-22):
- MKL orders a product's sums by its number of rows, and by whether it is alone in its batch. So every product has
  `NUM_ROWS` rows and is never alone; the heads of a group times the queries are padded to a multiple.
- A tile that a query does not see changes nothing, exactly: its weights are 0 and the running maximum stays.
- Hidden values are set to zero and hidden scores to -inf before sums, because 0 * NaN of an unwritten slot is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.ops.kv_format import dequantize_heads
from inferd.kernels.ops.paged_attention.batch import ATTENTION_SPLIT, AttentionBatch, QueryGroup

NUM_ROWS = 16
_LOWEST = torch.finfo(torch.float32).min


def paged_attention(
    q: Tensor,
    kv: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    kv_scales: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(q)
    for group in batch.groups:
        attended = _attend(q.index_select(0, group.tokens), kv, kv_scales, group, scale, window, softcap, sinks)
        out.index_copy_(0, group.tokens, attended.to(q.dtype))
    return out


def _attend(
    q: Tensor,
    kv: Tensor,
    kv_scales: Tensor | None,
    group: QueryGroup,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[B * n, Hq, D] in fp32. Heads that share a KV head are rows of one matmul, with M = n * (Hq / G) padded."""
    num_runs, num_queries = group.positions.shape
    num_heads = q.shape[1]
    num_kv_heads = kv.shape[2]
    repeat = num_heads // num_kv_heads
    packed = _pack(q.to(torch.float32) * scale, num_runs, num_kv_heads)
    num_rows = packed.shape[1]
    row_positions = _row_positions(group.positions, repeat, num_rows)

    peak = packed.new_full((num_runs * num_kv_heads, num_rows, 1), _LOWEST)
    total = torch.zeros_like(peak)
    if sinks is not None:
        # A sink is a key before all others whose values are 0.
        rows = _by_row(sinks, num_kv_heads, num_queries)
        peak.view(num_runs, num_kv_heads, num_rows)[..., : rows.shape[1]] = rows
        total.fill_(1.0)
    summed = torch.zeros_like(packed)
    for tile in range(_first_tile(group, window), group.num_tiles[0]):
        num_active = sum(num_tiles > tile for num_tiles in group.num_tiles)
        active = slice(0, num_active * num_kv_heads)
        keys, values = _gather(kv, kv_scales, group.tile_tables[:num_active], tile, q.dtype)
        scores = _product(packed[active], keys.transpose(1, 2))
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if _needs_mask(group, num_active, tile, window):
            _mask(scores, values, row_positions[:num_active], tile, window, num_kv_heads)
        new_peak = torch.maximum(peak[active], scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_peak).exp_()
        decay = (peak[active] - new_peak).exp_()
        total[active] = total[active] * decay + weights.sum(-1, keepdim=True)
        summed[active] = summed[active] * decay + _product(weights, values)
        peak[active] = new_peak
    return _unpack(summed / total, num_runs, num_queries, num_heads)


def _product(rows: Tensor, matrices: Tensor) -> Tensor:
    """[N, M, K] times [N, K, L], M a multiple of `NUM_ROWS`: a row's bits depend on that row and its matrix alone."""
    if rows.shape[1] > NUM_ROWS:
        blocks = rows.reshape(rows.shape[0], -1, NUM_ROWS, rows.shape[2])
        parts = [torch.bmm(blocks[i], matrices[i].expand(blocks.shape[1], -1, -1)) for i in range(len(blocks))]
        return torch.stack(parts).flatten(1, 2)
    if rows.shape[0] > 1:
        return torch.bmm(rows, matrices)
    return torch.bmm(rows.expand(2, -1, -1), matrices.expand(2, -1, -1))[:1]


def _pack(q: Tensor, num_runs: int, num_kv_heads: int) -> Tensor:
    """[B * n, Hq, D] -> [B * G, M, D], padded with zero rows to a multiple of `NUM_ROWS`."""
    tokens, num_heads, head_dim = q.shape
    num_queries, repeat = tokens // num_runs, num_heads // num_kv_heads
    grouped = q.view(num_runs, num_queries, num_kv_heads, repeat, head_dim).transpose(1, 2)
    packed = grouped.reshape(num_runs * num_kv_heads, num_queries * repeat, head_dim)
    return torch.nn.functional.pad(packed, (0, 0, 0, -packed.shape[1] % NUM_ROWS))


def _unpack(packed: Tensor, num_runs: int, num_queries: int, num_heads: int) -> Tensor:
    num_kv_heads = packed.shape[0] // num_runs
    repeat = num_heads // num_kv_heads
    grouped = packed[:, : num_queries * repeat].reshape(num_runs, num_kv_heads, num_queries, repeat, packed.shape[2])
    return grouped.transpose(1, 2).reshape(num_runs * num_queries, num_heads, packed.shape[2])


def _row_positions(positions: Tensor, repeat: int, num_rows: int) -> Tensor:
    """[B, M]: the position of the query in each row of the matmul; padding repeats the last."""
    spread = positions.repeat_interleave(repeat, dim=1)
    return torch.cat([spread, spread[:, -1:].expand(-1, num_rows - spread.shape[1])], dim=1)


def _by_row(sinks: Tensor, num_kv_heads: int, num_queries: int) -> Tensor:
    """[Hq] -> [G, n * (Hq / G)]: the sink of each row of the matmul, without padding."""
    return sinks.view(num_kv_heads, 1, -1).expand(-1, num_queries, -1).flatten(1)


def _gather(
    kv: Tensor, kv_scales: Tensor | None, tile_tables: Tensor, tile: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """K and V of one tile, each [B * G, ATTENTION_SPLIT, D] in fp32."""
    _, _, _, block_size, head_dim = kv.shape
    num_blocks = ATTENTION_SPLIT // block_size
    blocks = tile_tables[:, tile * num_blocks : (tile + 1) * num_blocks]
    pages = kv[blocks]
    if kv_scales is not None:
        pages = dequantize_heads(pages, kv_scales[blocks]).to(dtype)
    tiles = pages.to(torch.float32).permute(2, 0, 3, 1, 4, 5).reshape(2, -1, ATTENTION_SPLIT, head_dim)
    return tiles[0], tiles[1]


def _first_tile(group: QueryGroup, window: int | None) -> int:
    if window is None:
        return 0
    return max(0, min(group.first_positions) - window + 1) // ATTENTION_SPLIT


def _needs_mask(group: QueryGroup, num_active: int, tile: int, window: int | None) -> bool:
    """Whether some query of the active runs sees only a part of the tile."""
    first_positions = group.first_positions[:num_active]
    if (tile + 1) * ATTENTION_SPLIT - 1 > min(first_positions):
        return True
    last_position = max(first_positions) + group.positions.shape[1] - 1
    return window is not None and tile * ATTENTION_SPLIT <= last_position - window


def _mask(
    scores: Tensor, values: Tensor, row_positions: Tensor, tile: int, window: int | None, num_kv_heads: int
) -> None:
    """Hide keys from queries that must not see them, and zero values that no query of the run may see. In place."""
    num_runs, num_rows = row_positions.shape
    start = tile * ATTENTION_SPLIT
    kv_positions = torch.arange(start, start + ATTENTION_SPLIT, device=scores.device)
    hidden = kv_positions > row_positions[..., None]
    unseen = kv_positions > row_positions[:, -1:]
    if window is not None:
        hidden |= kv_positions <= row_positions[..., None] - window
        unseen |= kv_positions <= row_positions[:, :1] - window
    by_run = (num_runs, num_kv_heads, num_rows, ATTENTION_SPLIT)
    scores.view(by_run).masked_fill_(hidden[:, None], float("-inf"))
    values.view(num_runs, num_kv_heads, ATTENTION_SPLIT, -1).masked_fill_(unseen[:, None, :, None], 0.0)
