"""Paged attention by cuDNN's graphs, through nvidia-cudnn-frontend, which is installed beside inferd. Written against
its version 1.32.0; no GPU has run it yet.

A graph describes one shape of a step. Its plan is made at the step's first run, before a CUDA graph is captured, and
serves all layers and all later steps of that shape. Lengths, block tables and the offsets of rows are read on the
device. Rows of one query each lie in a dense tensor; other rows are packed, with offsets. A row without queries has
length 0.

K and V are [blocks, G, block_size, D], the two halves of each block of the pool. A window counts a query's own
position, as ours does.
"""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any, NamedTuple

import cudnn
import torch
from torch import Tensor

from inferd.kernels.ops.paged_attention.batch import AttentionBatch
from inferd.kernels.registry import KernelError


class _Uid(IntEnum):
    """Tensors of a graph."""

    Q = 1
    K = 2
    V = 3
    OUT = 4
    QUERY_LENS = 5
    KV_LENS = 6
    PAGE_TABLE = 7
    OFFSETS = 8


class _Shape(NamedTuple):
    """A plan's key."""

    dtype: torch.dtype
    num_rows: int
    max_queries: int
    num_heads: int
    pool: tuple[int, ...]
    """Shape of the pool."""
    table_width: int
    scale: float
    window: int | None

    @property
    def is_packed(self) -> bool:
        return self.max_queries > 1


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
    assert softcap is None and kv_scales is None and sinks is None and q.is_contiguous()
    num_rows, table_width = batch.page_table.shape
    shape = _Shape(q.dtype, num_rows, max(batch.query_lens), q.shape[1], kv.shape, table_width, scale, window)
    assert shape.is_packed or q.shape[0] == num_rows
    graph, num_bytes = _plan(shape)
    k, v = kv.unbind(1)
    query_lens, offsets = _lens(batch, q[0].numel())
    out = torch.empty_like(q)
    tensors = {
        _Uid.Q: q,
        _Uid.K: k,
        _Uid.V: v,
        _Uid.OUT: out,
        _Uid.QUERY_LENS: query_lens,
        _Uid.KV_LENS: batch.seq_lens,
        _Uid.PAGE_TABLE: batch.page_table,
    }
    if shape.is_packed:
        tensors[_Uid.OFFSETS] = offsets
    workspace = torch.empty(max(1, num_bytes), dtype=torch.uint8, device=q.device)
    cudnn.set_stream(handle=_handle(), stream=torch.cuda.current_stream().cuda_stream)
    graph.execute({int(uid): tensor for uid, tensor in tensors.items()}, workspace, handle=_handle())
    return out


def _lens(batch: AttentionBatch, row_size: int) -> tuple[Tensor, Tensor]:
    """(queries of each row, the first element of each row in q), made by the first layer of a step."""
    found: tuple[Tensor, Tensor] | None = batch.prepared.get(("cudnn", row_size))
    if found is None:
        starts = batch.query_start
        found = batch.prepared["cudnn", row_size] = (starts[1:] - starts[:-1], starts.to(torch.int64) * row_size)
    return found


@functools.cache
def _handle() -> Any:
    return cudnn.create_handle()


@functools.cache
def _plan(shape: _Shape) -> tuple[Any, int]:
    """(the graph with its plan, bytes of its workspace). Raises `KernelError` if cuDNN has no plan."""
    graph = _graph(shape)
    try:
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except cudnn.cudnnGraphNotSupportedError as error:
        what = f"{shape.num_rows} rows with up to {shape.max_queries} queries"
        raise KernelError(f"cuDNN has no plan for {what}: {error}; give --no-attention-libs") from error
    return graph, graph.get_workspace_size()


def _graph(shape: _Shape) -> Any:
    kinds = cudnn.data_type
    dtype = kinds.BFLOAT16 if shape.dtype == torch.bfloat16 else kinds.HALF
    graph = cudnn.pygraph(
        io_data_type=dtype, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=_handle()
    )

    def vector(uid: _Uid, length: int, kind: Any) -> Any:
        return graph.tensor(dim=(length, 1, 1, 1), stride=(1, 1, 1, 1), data_type=kind, uid=int(uid))

    blocks, _, num_kv_heads, block_size, head_dim = shape.pool
    page = block_size * head_dim
    pool_dim = (blocks, num_kv_heads, block_size, head_dim)
    pool_stride = (2 * num_kv_heads * page, page, head_dim, 1)
    token = shape.num_heads * head_dim
    dim = (shape.num_rows, shape.num_heads, shape.max_queries, head_dim)
    stride = (shape.max_queries * token, head_dim, token, 1)
    q = graph.tensor(dim=dim, stride=stride, data_type=dtype, uid=int(_Uid.Q))
    offsets = vector(_Uid.OFFSETS, shape.num_rows + 1, kinds.INT64) if shape.is_packed else None
    if offsets is not None:
        q.set_ragged_offset(offsets)
    table_dim, table_stride = (shape.num_rows, 1, shape.table_width, 1), (shape.table_width, shape.table_width, 1, 1)
    table = graph.tensor(dim=table_dim, stride=table_stride, data_type=kinds.INT32, uid=int(_Uid.PAGE_TABLE))
    out, _ = graph.sdpa(
        name="paged_attention",
        q=q,
        k=graph.tensor(dim=pool_dim, stride=pool_stride, data_type=dtype, uid=int(_Uid.K)),
        v=graph.tensor(dim=pool_dim, stride=pool_stride, data_type=dtype, uid=int(_Uid.V)),
        generate_stats=False,
        attn_scale=shape.scale,
        use_padding_mask=True,
        seq_len_q=vector(_Uid.QUERY_LENS, shape.num_rows, kinds.INT32),
        seq_len_kv=vector(_Uid.KV_LENS, shape.num_rows, kinds.INT32),
        paged_attention_k_table=table,
        paged_attention_v_table=table,
        paged_attention_max_seq_len_kv=shape.table_width * block_size,
        **_mask(shape),
    )
    out.set_uid(int(_Uid.OUT)).set_output(True).set_dim(dim).set_stride(stride).set_data_type(dtype)
    if offsets is not None:
        out.set_ragged_offset(offsets)
    return graph


def _mask(shape: _Shape) -> dict[str, Any]:
    """Arguments of the causal mask and the window. A lone query sees all keys of its row, so it needs no mask."""
    if not shape.is_packed and shape.window is None:
        return {}
    bounds = {"diagonal_band_right_bound": 0, "diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT}
    return bounds if shape.window is None else {**bounds, "diagonal_band_left_bound": shape.window}
