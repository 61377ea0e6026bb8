"""The choice between the Triton kernels of attention: tiles, whose bits depend on no cut, or parts, which take fewer
instructions.

It needs no Triton, so a start without a GPU can ask why one was refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from inferd.kernels.device import DeviceProperties
from inferd.kernels.ops.paged_attention import passes
from inferd.kernels.registry import Deferred, Implementation, Op, always

_PACKAGE = __name__.rpartition(".")[0]


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    has_softcap: bool
    is_chunk: bool
    """Whether rows have more queries than decodes and drafts."""
    device: DeviceProperties
    is_invariant: bool
    """Whether a row's bits must depend on its own sequence alone (`AttentionBatch.is_deterministic`)."""


def refuses_fp8(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, *, has_softcap: bool) -> str | None:
    """Why `parts_fp8.py` does not take such K, V and queries on any GPU; None if it does."""
    if (dtype, kv_dtype) != (torch.bfloat16, torch.float8_e4m3fn):
        return f"takes K and V in e4m3 for queries in bfloat16, not {kv_dtype} for {dtype}"
    if head_dim not in (64, 128, 256):
        return f"takes heads of 64, 128 or 256, not {head_dim}"
    return "does not cap scores" if has_softcap else None


def _refuses_parts_fp8(key: Key) -> str | None:
    if key.is_chunk:
        return "is for decodes and drafts"
    reason = refuses_fp8(key.dtype, key.kv_dtype, key.head_dim, has_softcap=key.has_softcap)
    return reason or passes.refuses_parts(key.device, 2, is_deterministic=key.is_invariant)


def _refuses_parts(key: Key) -> str | None:
    if key.kv_dtype != key.dtype:
        return f"takes K and V in the dtype of the queries, not {key.kv_dtype} for {key.dtype}"
    if key.device_type == "cuda" and key.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies 16-bit numbers, not {key.dtype}"
    return passes.refuses_parts(key.device, key.kv_dtype.itemsize, is_deterministic=key.is_invariant)


_VARIES = "a sequence's keys are cut by how many the step's other rows have"
Launch = Callable[[int, Sequence[Any], Mapping[str, Any]], None]
"""(programs, arguments of the kernel, constants and compiler options)."""
ATTENTION_SPLIT_KERNEL: Op[Key, Launch] = Op(
    "attention_split",
    [
        Implementation(
            "triton_parts",
            Deferred(f"{_PACKAGE}.parts", "launch"),
            _refuses_parts,
            varies=_VARIES,
        ),
        Implementation(
            "triton_parts_fp8", Deferred(f"{_PACKAGE}.parts_fp8", "launch"), _refuses_parts_fp8, varies=_VARIES
        ),
        Implementation("tiles", Deferred(f"{_PACKAGE}.tiles", "launch"), always),
    ],
)
