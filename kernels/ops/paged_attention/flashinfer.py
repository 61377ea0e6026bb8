"""Paged attention by FlashInfer (Ye et al. 2025, arXiv:2501.01005), a package that is installed beside inferd. Written
against its version 0.7.4; no GPU has run it yet.

It calls kernels of TensorRT-LLM. They find lengths and page tables on the device, so a CUDA graph can hold them.
FlashInfer's own wrappers (`BatchDecodeWithPagedKVCacheWrapper`) share out the work on the host before each step. That
needs lengths which the host does not know in a recorded step.

- XQA, on compute capability 9.x and 12.x, takes steps of rows with one query each. It reads nothing behind a row's end.
- trtllm-gen, on 10.x, takes prompts too. It loads whole blocks, so a NaN behind a row's end makes results NaN, as with
  FlashAttention-3 (`flash_attention_3.py`).

K and V are [blocks, G, block_size, D], the two halves of each block of the pool. A window is the number of positions
before a query's own. XQA is compiled at its first call for a kind of heads, which takes a minute, or comes with
flashinfer-jit-cache. Later starts find it in `~/.cache/flashinfer`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.ops.paged_attention.batch import AttentionBatch
from inferd.kernels.registry import KernelError

COUNTERS_BYTES = 8 << 20
"""Memory that must be 0 before the first call; each call leaves it 0. XQA takes as much from the start of its
workspace. trtllm-gen counts in 4 bytes for each row and head."""
XQA_BYTES = 8 << 20
"""Memory for partial results of XQA: at most a part for each multiprocessor, of 16 heads of 256 in 16 bits."""
TRTLLM_GEN_BYTES = 128 << 20
"""Memory for those of trtllm-gen, which does not check that they fit. Its source calls 128 to 256 MiB typical."""

_loaded: set[Hashable] = set()
"""Kinds of calls that have succeeded."""


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
    """Raises `KernelError` if FlashInfer cannot load or build its kernel."""
    assert softcap is None and kv_scales is None and q.is_contiguous()
    is_trtllm_gen = gpu.properties_of(q.device).has_tensor_memory
    arguments: dict[str, Any] = {
        "query": q,
        "kv_cache": kv.unbind(1),
        "block_tables": batch.page_table,
        "seq_lens": batch.seq_lens,
        "bmm1_scale": scale,
        "bmm2_scale": 1.0,
        "window_left": -1 if window is None else window - 1,
        "sinks": sinks,
        "kv_layout": "HND",
        "enable_pdl": gpu.dependent_options()["launch_pdl"],
    }
    call = _trtllm_gen if is_trtllm_gen else _xqa
    kind = (q.dtype, q.shape[1:], kv.shape[2:], window is None, sinks is None, batch.is_decode)
    try:
        out = call(arguments, batch)
    except RuntimeError as error:
        if kind in _loaded or isinstance(error, torch.OutOfMemoryError):
            raise
        raise KernelError(f"FlashInfer has no kernel that runs here: {error}; give --no-attention-libs") from error
    _loaded.add(kind)
    return out


def _xqa(arguments: dict[str, Any], batch: AttentionBatch) -> Tensor:
    assert batch.is_decode
    workspace = _workspace(arguments["query"].device, XQA_BYTES)
    out: Tensor = trtllm_batch_decode_with_kv_cache(
        **arguments, workspace_buffer=workspace, max_seq_len=_most_keys(batch), backend="xqa"
    )
    return out


def _trtllm_gen(arguments: dict[str, Any], batch: AttentionBatch) -> Tensor:
    workspace = _workspace(arguments["query"].device, TRTLLM_GEN_BYTES)
    memory = {
        "multi_ctas_kv_counter_buffer": workspace[:COUNTERS_BYTES],
        "workspace_buffer": workspace[COUNTERS_BYTES:],
    }
    out: Tensor
    if batch.is_decode:
        out = trtllm_batch_decode_with_kv_cache(
            **arguments, **memory, max_seq_len=_most_keys(batch), backend="trtllm-gen"
        )
    else:
        out = trtllm_batch_context_with_kv_cache(
            **arguments,
            **memory,
            max_q_len=max(batch.query_lens),
            max_kv_len=_most_keys(batch),
            batch_size=batch.seq_lens.shape[0],
            cum_seq_lens_q=batch.query_start,
            cum_seq_lens_kv=_kv_starts(batch),
        )
    return out


def _most_keys(batch: AttentionBatch) -> int:
    """Length of the longest row, or as many tokens as a block table holds."""
    lens = batch.host_seq_lens
    return batch.block_tables.shape[1] * batch.block_size if lens is None else max(lens)


def _kv_starts(batch: AttentionBatch) -> Tensor:
    """[R + 1] int32: sums of the KV lengths of the rows before, made by the first layer of a step."""
    found: Tensor | None = batch.prepared.get("flashinfer")
    if found is None:
        sums = batch.seq_lens.cumsum(0, dtype=torch.int32)
        found = batch.prepared["flashinfer"] = torch.nn.functional.pad(sums, (1, 0))
    return found


@functools.cache
def _workspace(device: torch.device, partials_bytes: int) -> Tensor:
    """Counters, and memory for partial results behind them. A step's first run makes it, before a CUDA graph is
    captured; all layers and all steps share it."""
    return torch.zeros(COUNTERS_BYTES + partials_bytes, dtype=torch.uint8, device=device)
