"""The greedy token of each row of logits, and whether the row allows one at all, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.argmax import cpu, reference
from inferd.kernels.registry import Deferred, Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype
    vocab_size: int


def _refuses_cpp(key: Key) -> str | None:
    if key.dtype != torch.float32:
        return f"takes float32, not {key.dtype}"
    return native.refuses(key.device_type, key.dtype)


def _refuses_triton(key: Key) -> str | None:
    return gpu.refuses(key.device_type, key.dtype)


ARGMAX: Op[Key, Callable[[Tensor], tuple[Tensor, Tensor]]] = Op(
    "argmax",
    [
        Implementation("cpp", cpu.argmax, _refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton", "argmax"), _refuses_triton),
        Implementation("reference", reference.argmax, always),
    ],
)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(ids [R] int64, is_none [R] bool): the id of the largest logit of each row [R, V], the lowest id among equals.

    `is_none` is set if the row holds a NaN or +inf, or nothing above -inf. Its id is then any below V.
    """
    return ARGMAX.resolve(Key(logits.device.type, logits.dtype, logits.shape[1]))(logits)
