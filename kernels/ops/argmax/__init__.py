"""The greedy token of each row of logits, and whether the row allows one at all, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
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


def cpp(logits: Tensor) -> tuple[Tensor, Tensor]:
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, size = logits.shape
    ids, is_none = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    native.function("inferd_argmax")(
        logits.data_ptr(), ids.data_ptr(), is_none.data_ptr(), rows, size, logits.stride(0), torch.get_num_threads()
    )
    return ids, is_none


def reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    peaks, ids = logits.max(dim=-1)  # the maximum of a row that holds a NaN is NaN
    return ids, ~peaks.isfinite()


ARGMAX: Op[Key, Callable[[Tensor], tuple[Tensor, Tensor]]] = Op(
    "argmax",
    [
        Implementation("cpp", cpp, _refuses_cpp),
        Implementation("triton", Deferred(f"{__name__}.triton", "argmax"), _refuses_triton),
        Implementation("reference", reference, always),
    ],
)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(ids [R] int64, is_none [R] bool): the id of the largest logit of each row [R, V], the lowest id among equals.

    `is_none` is set if the row holds a NaN or +inf, or nothing above -inf. Its id is then any below V.
    """
    return ARGMAX.resolve(Key(logits.device.type, logits.dtype, logits.shape[1]))(logits)
