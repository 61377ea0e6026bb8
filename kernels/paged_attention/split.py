"""The choice between the two Triton kernels of attention: tiles, whose bits depend on no cut, or parts, which are
faster.

It needs no Triton, so a start without a GPU can ask why one was refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from inferd.kernels.paged_attention import passes
from inferd.kernels.registry import Deferred, Implementation, Op, always

_PACKAGE = __name__.rpartition(".")[0]


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    sm: int
    """Compute capability: 10 * major + minor."""
    is_invariant: bool
    """Whether a row's bits must depend on its own sequence alone (`AttentionBatch.is_deterministic`)."""


def _refuses_parts(key: Key) -> str | None:
    if key.kv_dtype != key.dtype:
        return f"takes K and V in the dtype of the queries, not {key.kv_dtype} for {key.dtype}"
    if key.device_type == "cuda" and key.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies 16-bit numbers, not {key.dtype}"
    return passes.refuses_parts(key.sm, key.kv_dtype.itemsize, is_deterministic=key.is_invariant)


Launch = Callable[[int, Sequence[Any], Mapping[str, Any]], None]
"""(programs, arguments of the kernel, constants and compiler options)."""
ATTENTION_SPLIT_KERNEL: Op[Key, Launch] = Op(
    "attention_split",
    [
        Implementation(
            "triton_parts",
            Deferred(f"{_PACKAGE}.parts", "launch"),
            _refuses_parts,
            varies="a sequence's keys are cut by how many the step's other rows have",
        ),
        Implementation("tiles", Deferred(f"{_PACKAGE}.triton", "launch_tiles"), always),
    ],
)
