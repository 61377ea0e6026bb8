"""Reads AutoAWQ's GEMM packing: w = (q - z) s, with q and z packed along the outputs, both unsigned."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inferd.engine.arch.formats import Awq
from inferd.engine.arch.weights import QuantizedSource
from inferd.engine.quant.checkpoints.integers import groups, unpacked, weights
from inferd.engine.quant.checkpoints.reader import Reader, Rows, Tensors, check_only, check_scales

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in the word of each of its 8 outputs."""
_PER_WORD = len(_ORDER)


def _unpacked(words: Tensor) -> Tensor:
    """[R, W] int32, packed along W, as [8 W, R] uint8."""
    columns = words.T.contiguous()
    out = torch.empty((len(columns), _PER_WORD, columns.shape[1]), dtype=torch.uint8)
    for output, place in enumerate(_ORDER):
        out[:, output] = (columns >> (4 * place)).bitwise_and_(15)
    return out.flatten(0, 1)


def _check(source: QuantizedSource, tensors: Tensors) -> None:
    form = source.format
    assert isinstance(form, Awq)
    check_scales(f"{source.module}.scales", tensors["scales"], has_signs=True)
    if form.is_symmetric and "qzeros" in tensors:
        zeros = unpacked(tensors["qzeros"], form.bits)
        check_only(f"{source.module}.qzeros", zeros, 8, "because config.json says that there are no zero points")
    if "bias" in tensors:
        check_only(f"{source.module}.bias", tensors["bias"], 0, "because this module has no bias by config.json")


def _read(source: QuantizedSource, tensors: Tensors) -> Iterator[Rows]:
    form = source.format
    assert isinstance(form, Awq)
    yield groups(source, "scales", tensors["scales"].T)
    if not form.is_symmetric:
        yield groups(source, "zeros", _unpacked(tensors["qzeros"]))

    def unpack(rows: slice) -> Tensor:
        words = slice(rows.start // _PER_WORD, rows.stop // _PER_WORD)
        return _unpacked(tensors["qweight"][:, words])

    yield from weights(source, unpack, None)


READER = Reader(_check, _read)
