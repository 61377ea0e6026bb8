"""Reads GPTQ: w = (q - z) s, with q packed along the inputs and z along the outputs, both unsigned.

Version 1 of the format stores a word of zero points less 1 in each of its places. The subtraction may borrow from the
next place, so 1 is added to the places of a word by one addition, as GPTQModel does.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from inferd.engine.arch.formats import Gptq
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
from inferd.engine.quant.checkpoints.reader import Reader, Rows, Tensors, check_only, check_scales

_ONES = {4: 0x11111111, 8: 0x01010101}


def _check(source: QuantizedSource, tensors: Tensors) -> None:
    form = source.format
    assert isinstance(form, Gptq)
    check_scales(f"{source.module}.scales", tensors["scales"], has_signs=True)
    order_of(source, tensors, "g_idx", form.group_size)
    if form.is_symmetric:
        # In version 1 the stored numbers are one less, so the message has what is stored.
        middle = (1 << (form.bits - 1)) - (0 if form.is_v2 else 1)
        zeros = unpacked(tensors["qzeros"], form.bits)[:, : source.shape[0]]
        check_only(f"{source.module}.qzeros", zeros, middle, "because config.json says sym")
    if "bias" in tensors:
        check_only(f"{source.module}.bias", tensors["bias"], 0, "because this module has no bias by config.json")


def _read(source: QuantizedSource, tensors: Tensors) -> Iterator[Rows]:
    form = source.format
    assert isinstance(form, Gptq)
    order = order_of(source, tensors, "g_idx", form.group_size)
    yield groups(source, "scales", tensors["scales"].T)
    if not form.is_symmetric:
        words = tensors["qzeros"] if form.is_v2 else tensors["qzeros"] + _ONES[form.bits]
        zeros = unpacked(words, form.bits)[:, : source.shape[0]]
        yield groups(source, "zeros", as_zeros(zeros, form.bits).T)
    yield from order_rows(source, order)

    def unpack(rows: slice) -> Tensor:
        return as_weights(unpacked(tensors["qweight"][:, rows].T, form.bits), form.bits)

    yield from weights(source, unpack, order)


READER = Reader(_check, _read)
