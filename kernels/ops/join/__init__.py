"""Columns of several matrices side by side: the outputs of a layer whose parts have kernels of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops.join import cpu
from inferd.kernels.registry import Implementation, Op, always


class Key(NamedTuple):
    device_type: str
    dtype: torch.dtype


def _torch(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), 1)


JOIN: Op[Key, Callable[[Sequence[Tensor]], Tensor]] = Op(
    "join",
    [
        Implementation("cpp", cpu.join, lambda key: native.refuses(key.device_type, key.dtype)),
        Implementation("reference", _torch, always),
    ],
)


def join(parts: Sequence[Tensor]) -> Tensor:
    """[T, n0], [T, n1], ... of one dtype -> [T, n0 + n1 + ...]."""
    first = parts[0]
    assert all(part.dtype == first.dtype and part.shape[0] == first.shape[0] for part in parts)
    return JOIN.resolve(Key(first.device.type, first.dtype))(parts)
