"""Columns of several matrices side by side: the outputs of a layer whose parts have kernels of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.registry import Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype


def cpp(parts: Sequence[Tensor]) -> Tensor:
    """A recorded step can hold it."""
    num_rows, width = parts[0].shape[0], sum(part.shape[1] for part in parts)
    out = torch.empty((num_rows, width), dtype=parts[0].dtype)
    copy, start, size = native.function("inferd_join"), 0, out.element_size()
    for part in parts:
        part = part if part.stride(1) == 1 else part.contiguous()
        row_bytes, place = part.shape[1] * size, out.data_ptr() + start * size
        copy(part.data_ptr(), part.stride(0) * size, row_bytes, num_rows, place, width * size)
        start += part.shape[1]
    return out


def reference(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), 1)


JOIN: Op[Key, Callable[[Sequence[Tensor]], Tensor]] = Op(
    "join",
    [
        Implementation("cpp", cpp, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("reference", reference, always),
    ],
)


def join(parts: Sequence[Tensor]) -> Tensor:
    """[T, n0], [T, n1], ... of one dtype -> [T, n0 + n1 + ...]."""
    first = parts[0]
    assert all(part.dtype == first.dtype and part.shape[0] == first.shape[0] for part in parts)
    return JOIN.resolve(Key(first.device.type, first.dtype))(parts)
