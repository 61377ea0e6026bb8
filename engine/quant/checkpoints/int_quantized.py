"""Reads compressed-tensors `int-quantized`: w = (q - z) s, with q and z in signed bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inferd.engine.arch.formats import IntQuantized
from inferd.engine.arch.weights import QuantizedSource
from inferd.engine.quant.checkpoints.integers import groups, weights
from inferd.engine.quant.checkpoints.reader import Reader, Rows, Tensors, check_range, check_scales

_NIBBLE = (-8, 7)


def _check(source: QuantizedSource, tensors: Tensors) -> None:
    form = source.format
    assert isinstance(form, IntQuantized)
    check_scales(f"{source.module}.weight_scale", tensors["weight_scale"], has_signs=True)
    if form.bits == 4 and not form.is_symmetric:
        check_range(f"{source.module}.weight_zero_point", tensors["weight_zero_point"], *_NIBBLE)


def _read(source: QuantizedSource, tensors: Tensors) -> Iterator[Rows]:
    form, (num_rows, _) = source.format, source.shape
    assert isinstance(form, IntQuantized)
    shape = (1 if form.has_tensor_scale else num_rows, -1)
    yield groups(source, "scales", tensors["weight_scale"].reshape(shape))
    if not form.is_symmetric:
        zeros = tensors["weight_zero_point"].reshape(shape)
        yield groups(source, "zeros", (zeros + 8).to(torch.uint8) if form.bits == 4 else zeros.to(torch.int16))

    def unpack(rows: slice) -> Tensor:
        values = tensors["weight"][rows]
        if form.bits == 8:
            return values
        check_range(f"{source.module}.weight", values, *_NIBBLE)
        return (values + 8).to(torch.uint8)

    yield from weights(source, unpack, None)


READER = Reader(_check, _read)
