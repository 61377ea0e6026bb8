"""Unpacks integers from words, and checks and orders groups of inputs. Formats of integers share this.

Weights are unpacked in parts of a megabyte, so that loading a matrix takes little more than its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from inferd.engine.arch.stored import IntLayout
from inferd.engine.arch.weights import QuantizedSource
from inferd.engine.quant.checkpoints.reader import CheckpointError, Rows, Tensors, check_range

_PART_WEIGHTS = 1 << 20
_PART_ROWS = 8
"""Parts begin at multiples of this: some formats pack so many rows into a word."""


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Words [R, W] int32 as unsigned integers [R, W * 32 / bits] uint8. The first is in the lowest bits."""
    packed = words.contiguous().view(torch.uint8)
    return packed if bits == 8 else nibbles(packed)


def nibbles(packed: Tensor) -> Tensor:
    """Bytes [R, B] as their halves [R, 2 B] uint8, the lower half first.

    Runs at 5.5 G weights/s on one core, and `stack((packed & 15, packed >> 4))` at 0.6 (AMD EPYC Zen 4, busy,
    2026-11-23).
    """
    wide = packed.contiguous().to(torch.int16)
    return (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F).view(torch.uint8)


def as_weights(values: Tensor, bits: int) -> Tensor:
    """Unsigned integers as a kernel takes them: those of 4 bits as they are, those of 8 bits less 128, in int8."""
    return values if bits == 4 else (values ^ 128).view(torch.int8)


def as_zeros(values: Tensor, bits: int) -> Tensor:
    """Zero points of unsigned integers, likewise."""
    return values if bits == 4 else values.to(torch.int16) - 128


def layout_of(source: QuantizedSource) -> IntLayout:
    layout = source.format.layout
    assert isinstance(layout, IntLayout)
    return layout


def parts(source: QuantizedSource) -> Iterator[slice]:
    """Ranges of rows of the matrix, each of about `_PART_WEIGHTS`."""
    num_rows, in_size = source.shape
    step = max(1, _PART_WEIGHTS // in_size // _PART_ROWS) * _PART_ROWS
    yield from (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def weights(source: QuantizedSource, unpack: Callable[[slice], Tensor], order: Tensor | None) -> Iterator[Rows]:
    """The rows of `q`: `unpack` gives some of them [n, K]. Columns are brought into `order`."""
    for part in parts(source):
        values = unpack(part)
        if order is not None:
            values = torch.gather(values, 1, order.expand(len(values), -1))  # 7 times as fast as values[:, order]
        yield Rows("q", source.row + part.start, values)


def groups(source: QuantizedSource, name: str, values: Tensor) -> Rows:
    """Scales or zero points [N or 1, groups] as rows of the scheme's tensor. The kernel's groups may be smaller."""
    (num_rows, in_size), size = source.shape, layout_of(source).group_size
    wanted = 1 if size is None else in_size // size
    wide = values.expand(num_rows, values.shape[1]).repeat_interleave(wanted // values.shape[1], 1)
    return Rows(name, source.row, wide)


def order_of(source: QuantizedSource, tensors: Tensors, suffix: str, group_size: int | None) -> Tensor | None:
    """The inputs [K] sorted by group, from the group of each input; None if they are in order. A group's inputs keep
    their order. Raises `CheckpointError` unless each group has `group_size` inputs."""
    if suffix not in tensors or group_size is None:
        return None
    name, in_size = f"{source.module}.{suffix}", source.shape[1]
    found = tensors[suffix].long()
    check_range(name, found, 0, in_size // group_size - 1)
    counts = torch.bincount(found, minlength=in_size // group_size)
    if not (counts == group_size).all():
        raise CheckpointError(
            f"{name} must put {group_size} inputs into each group, but puts {counts.min()} to {counts.max()}"
        )
    order = torch.argsort(found, stable=True)
    if not torch.equal(order, torch.arange(in_size)):
        if not layout_of(source).has_order:
            raise CheckpointError(f"{name} orders the inputs, but config.json says that they have their own order")
        return order
    return None


def order_rows(source: QuantizedSource, order: Tensor | None) -> Iterator[Rows]:
    """The scheme's row of `order` for this matrix, if its layout has one."""
    if layout_of(source).has_order:
        in_size = source.shape[1]
        yield Rows("order", source.index, (torch.arange(in_size) if order is None else order).unsqueeze(0))
