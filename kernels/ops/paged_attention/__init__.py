"""Causal attention over a paged KV pool. One call computes any mix of prompt chunks and decodes.

It supports grouped-query and multi-query heads, a sliding window, a soft cap of the scores, and sinks. A row's result
depends on its own sequence alone, bit for bit: neither on the batch, nor on how its tokens were split over steps. On a
GPU that holds for batches that are deterministic.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.ops.kv_format import check_scales, refuses_kv
from inferd.kernels.ops.paged_attention import cpu, reference
from inferd.kernels.ops.paged_attention.batch import ATTENTION_SPLIT, AttentionBatch
from inferd.kernels.registry import Deferred, Implementation, Op, always

__all__ = ["ATTENTION_SPLIT", "LIBRARIES", "PAGED_ATTENTION", "AttentionBatch", "paged_attention"]

LIBRARIES = ("flash_attention_3", "flashinfer", "cudnn", "flash_attention_4")
"""Implementations by libraries that are installed beside inferd, best first. We have measured none. SGLang's defaults
are FlashAttention-3 on Hopper and FlashInfer's kernels on B200 (docs.sglang.io, "Attention Backend"). FlashInfer
installs cuDNN's front end, so it would compute next to nothing behind cuDNN."""


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    heads_per_kv_head: int
    block_size: int
    has_window: bool
    has_softcap: bool
    is_recorded: bool
    """As of `AttentionBatch`."""
    is_invariant: bool
    """Whether a row's bits must depend on its own sequence alone."""
    has_sinks: bool = False
    is_decode: bool = False
    """As of `AttentionBatch`."""


def _refuses_triton(key: Key) -> str | None:
    if key.head_dim > 256:
        return f"takes head sizes up to 256, not {key.head_dim}"
    if key.block_size & (key.block_size - 1):
        return f"takes block sizes that are powers of two, not {key.block_size}"
    if key.device_type == "cuda" and key.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies 16-bit numbers, not {key.dtype}"
    return refuses_kv(key.dtype, key.kv_dtype) or gpu.refuses(key.device_type, key.dtype, key.kv_dtype)


def _refuses_library(key: Key, module: str, *majors: int, takes_sinks: bool = False) -> str | None:
    """Why no library takes such K, V and queries, or why `module` does not run on this GPU. `majors`: the major numbers
    of the compute capabilities that it has kernels for."""
    if key.device_type != "cuda":
        return "runs on GPUs only"
    if key.is_invariant:
        return _CUTS_KEYS
    if key.has_sinks and not takes_sinks:
        return "is called without sinks"
    if not gpu.is_installed(module):
        return f"{module} is not installed"
    device = gpu.properties_of()
    if device.sm // 10 not in majors:
        needed = _listed([f"{one}.x" for one in majors])
        return f"needs compute capability {needed}; this GPU has {device.capability}"
    if key.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies 16-bit numbers, not {key.dtype}"
    if key.kv_dtype != key.dtype:
        return f"takes K and V in the dtype of the queries, not {key.kv_dtype} for {key.dtype}"
    if key.head_dim > 256 or key.head_dim % 8:
        return f"takes head sizes that are multiples of 8, up to 256, not {key.head_dim}"
    return None


def _refuses_flash_attention_3(key: Key) -> str | None:
    return _refuses_library(key, "flash_attn_interface", 9)


def _refuses_flashinfer(key: Key) -> str | None:
    """FlashInfer has two sets of kernels: trtllm-gen for compute capability 10.x, and XQA."""
    reason = _refuses_library(key, "flashinfer", 9, 10, 12, takes_sinks=True)
    if reason is not None:
        return reason
    if key.has_softcap:
        return "does not cap scores"
    if gpu.properties_of().has_tensor_memory:
        return _refuses_trtllm_gen(key)
    if not key.is_decode:
        return "computes only steps of rows with one query each on compute capability 9.x and 12.x"
    if key.block_size not in (16, 32, 64, 128):
        return f"takes blocks of 16, 32, 64 or 128 tokens, not {key.block_size}"
    if key.head_dim % 16 or key.heads_per_kv_head > 16:
        return "takes head sizes that are multiples of 16, and at most 16 query heads for each KV head"
    return _refuses_to_load(key.head_dim in _BUILT_HEADS and key.heads_per_kv_head in _BUILT_GROUPS)


def _refuses_trtllm_gen(key: Key) -> str | None:
    if key.is_recorded and not key.is_decode:
        return "computes no recorded steps with prompts: nobody says what it does with rows that have no queries"
    if key.block_size not in (16, 32, 64):
        return f"takes blocks of 16, 32 or 64 tokens, not {key.block_size}"
    if key.head_dim not in _BUILT_HEADS:
        return f"takes heads of {_listed(_BUILT_HEADS)} on compute capability 10.x, not {key.head_dim}"
    if not gpu.is_installed("flashinfer_cubin"):
        return "needs the package flashinfer-cubin: without it, FlashInfer downloads each kernel at its first call"
    return _refuses_to_load(is_built=True)


_BUILT_HEADS, _BUILT_GROUPS = (64, 128, 256), (1, 2, 4, 8)
"""Head sizes, and query heads of a KV head, that flashinfer-jit-cache has kernels for (0.7.4, `flashinfer/aot.py`)."""


def _refuses_to_load(is_built: bool) -> str | None:
    """Why FlashInfer can neither load nor build a kernel at its first call. `is_built`: whether flashinfer-jit-cache
    has it."""
    if _has_nvcc() or (is_built and gpu.is_installed("flashinfer_jit_cache")):
        return None
    if is_built:
        return "needs nvcc, or the package flashinfer-jit-cache"
    heads, groups = _listed(_BUILT_HEADS), _listed(_BUILT_GROUPS)
    return f"needs nvcc: flashinfer-jit-cache has kernels for heads of {heads}, and {groups} of them for each KV head"


@functools.cache
def _has_nvcc() -> bool:
    """Whether nvcc is in a place that FlashInfer knows."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        return (Path(home) / "bin/nvcc").exists()
    return shutil.which("nvcc") is not None or Path("/usr/local/cuda/bin/nvcc").exists()


def _listed(values: Sequence[object]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def _refuses_cudnn(key: Key) -> str | None:
    reason = _refuses_library(key, "cudnn", 9, 10)
    if reason is not None:
        return reason
    if key.has_softcap:
        return "does not cap scores"
    if not key.is_recorded:
        return "makes a plan for each shape of a step, and only recorded steps have few shapes"
    if gpu.properties_of().has_tensor_memory and key.head_dim > 128:
        return f"takes head sizes up to 128 on compute capability 10.x, not {key.head_dim}"
    version: int = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return None if version >= _CUDNN else f"needs cuDNN {_dotted(_CUDNN)} or later; torch has {_dotted(version)}"


def _dotted(version: int) -> str:
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


def _refuses_flash_attention_4(key: Key) -> str | None:
    reason = _refuses_library(key, "flash_attn.cute", 9, 10)
    if reason is None and 128 < key.head_dim < 256 and gpu.properties_of().has_tensor_memory:
        return f"takes head sizes up to 128, or 256, on compute capability 10.x, not {key.head_dim}"
    return reason


_CUTS_KEYS = "cuts a sequence's keys by what else the step has"
_LIBRARY_VARIES = f"the library {_CUTS_KEYS}"
_CUDNN = 91_002
"""The first cuDNN without faults in paged attention that its front end knows of, as torch writes versions: 9.10.2."""

Run = Callable[[Tensor, Tensor, AttentionBatch, float, int | None, float | None, Tensor | None, Tensor | None], Tensor]
PAGED_ATTENTION: Op[Key, Run] = Op(
    "paged_attention",
    [
        Implementation(
            "cpp",
            cpu.paged_attention,
            lambda key: cpu.refuses(key.device_type, key.dtype, key.kv_dtype, key.heads_per_kv_head, key.block_size),
        ),
        Implementation(
            "flash_attention_3",
            Deferred(f"{__name__}.flash_attention_3", "paged_attention"),
            _refuses_flash_attention_3,
            varies=_LIBRARY_VARIES,
        ),
        Implementation(
            "flashinfer",
            Deferred(f"{__name__}.flashinfer", "paged_attention"),
            _refuses_flashinfer,
            varies=_LIBRARY_VARIES,
        ),
        Implementation(
            "cudnn", Deferred(f"{__name__}.cudnn", "paged_attention"), _refuses_cudnn, varies=_LIBRARY_VARIES
        ),
        Implementation(
            "flash_attention_4",
            Deferred(f"{__name__}.flash_attention_4", "paged_attention"),
            _refuses_flash_attention_4,
            varies=_LIBRARY_VARIES,
        ),
        Implementation("triton", Deferred(f"{__name__}.triton", "paged_attention"), _refuses_triton),
        Implementation(
            "reference", reference.paged_attention, always, varies="rows of one length are multiplied together"
        ),
    ],
)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend each query to the positions up to its own: [T, Hq, D] in q's dtype.

    q [T, Hq, D], contiguous. kv [blocks, 2 (k, v), G, block_size, D], in q's dtype or in 8 bits, holds this step's
    tokens already. Each block is contiguous; on a CPU blocks may lie apart. G divides Hq, and query head h reads KV
    head h // (Hq / G). With a `window` w a query sees the last w positions, its own included. `softcap` c turns a
    score s into c * tanh(s / c). Slots that no query sees may hold anything, NaN included. But a library needs numbers
    in the slots of the blocks that a row uses.

    Exactly a pool of 8 bits (`kv_format`) has `kv_scales` [blocks, 2, G, block_size, groups]. Its elements are numbers
    times scales, rounded to q's dtype. For a deterministic batch, results have the bits of those over a pool of such
    elements.

    `sinks` [Hq] fp32, contiguous: a score of each head that takes part in its softmax, beside those of the keys, and
    has no value.
    """
    assert q.shape[0] == batch.num_tokens and q.shape[2] == kv.shape[4] and q.shape[1] % kv.shape[2] == 0
    assert kv.shape[1] == 2 and kv.shape[3] == batch.block_size
    assert kv.is_contiguous() or (kv[0].is_contiguous() and kv.device.type == "cpu")
    assert window is None or window >= 1
    assert sinks is None or (sinks.shape == q.shape[1:2] and sinks.dtype == torch.float32 and sinks.is_contiguous())
    check_scales(kv, kv_scales)
    key = Key(
        q.device.type,
        q.dtype,
        kv.dtype,
        q.shape[2],
        q.shape[1] // kv.shape[2],
        batch.block_size,
        window is not None,
        softcap is not None,
        batch.is_recorded,
        batch.is_deterministic,
        sinks is not None,
        batch.is_decode,
    )
    return PAGED_ATTENTION.resolve(key)(q, kv, batch, scale, window, softcap, kv_scales, sinks)
