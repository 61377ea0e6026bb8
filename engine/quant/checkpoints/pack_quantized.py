"""Reads compressed-tensors `pack-quantized`: w = (q - z) s, with q and z packed as unsigned integers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from inferd.engine.arch.formats import PackQuantized
from inferd.engine.arch.weights import QuantizedSource
from inferd.engine.quant.checkpoints.integers import (
    as_weights,
    as_zeros,
    groups,
    order_of,
    order_rows,
    unpacked,
    weights,
)
from inferd.engine.quant.checkpoints.reader import CheckpointError, Reader, Rows, Tensors, check_scales


def _check(source: QuantizedSource, tensors: Tensors) -> None:
    form = source.format
    assert isinstance(form, PackQuantized)
    check_scales(f"{source.module}.weight_scale", tensors["weight_scale"], has_signs=True)
    shape = tensors.get("weight_shape")
    if shape is not None and tuple(shape.tolist()) != source.shape:
        raise CheckpointError(
            f"{source.module}.weight_shape is {shape.tolist()}, but by config.json the matrix is {list(source.shape)}"
        )
    order_of(source, tensors, "weight_g_idx", form.group_size)


def _read(source: QuantizedSource, tensors: Tensors) -> Iterator[Rows]:
    form, (num_rows, in_size) = source.format, source.shape
    assert isinstance(form, PackQuantized)
    order = order_of(source, tensors, "weight_g_idx", form.group_size)
    scales = tensors["weight_scale"].reshape(1 if form.has_tensor_scale else num_rows, -1)
    yield groups(source, "scales", scales)
    if not form.is_symmetric:
        zeros = unpacked(tensors["weight_zero_point"].T, form.bits).T[: len(scales)]
        yield groups(source, "zeros", as_zeros(zeros, form.bits))
    yield from order_rows(source, order)

    def unpack(rows: slice) -> Tensor:
        return as_weights(unpacked(tensors["weight_packed"][rows], form.bits)[:, :in_size], form.bits)

    yield from weights(source, unpack, order)


READER = Reader(_check, _read)
