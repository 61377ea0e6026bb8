"""Calls the C++ products of `quantized_tiles.cpp`, for `linear_int4` and `linear_int8` with AMX and activations in
bfloat16.

Each weight is rounded to bfloat16, and the layer is `linear` with such weights, bit for bit. Activations are not
quantized. Weights with fp32 scales and zero points may differ in their last bit from `Matrix.dequantized`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels import native, pages
from inferd.kernels.int_product import COLUMNS, SCALE_TYPES, address, in_tiles, padded
from inferd.kernels.quantized import TABLES, UNITS, Apply, Key, Matrix

_UNIT = 32
"""Inputs of a unit of weights."""
_ALL = 62
"""Bits of the inputs' numbers, if a group is a row."""


def refuses(key: Key) -> str | None:
    reason = native.refuses(key.device_type, key.dtype)
    if reason is not None:
        return reason
    if native.level() != "amx":
        return f"needs AMX; these kernels are compiled for {native.level()}"
    return None if key.dtype == torch.bfloat16 else f"takes activations in bfloat16, not {key.dtype}"


def bind(matrix: Matrix, out_dtype: torch.dtype) -> Apply:
    """The layer of x in bfloat16."""
    (out_size, in_size), key = matrix.q.shape, matrix.key(torch.bfloat16)
    is_short = matrix.q.dtype == torch.uint8
    num_columns, num_inputs = padded(out_size, COLUMNS), padded(in_size, _UNIT)
    num_groups = num_inputs // key.group_size if key.group_size else 1
    numbers = pages.empty(num_columns * num_inputs // (2 if is_short else 1))
    q = matrix.q.contiguous()
    native.function("inferd_quantized_tiles_pack")(
        q.data_ptr(), is_short, out_size, in_size, numbers.data_ptr(), torch.get_num_threads()
    )

    def packed(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if values is None:
            return None
        return in_tiles(torch.nn.functional.pad(values, (0, num_groups - values.shape[1])), num_columns, dtype)

    scales, minimums = packed(matrix.scales, key.scales), packed(matrix.minimums, key.scales)
    zeros = packed(matrix.zeros, torch.uint8 if is_short else torch.int16)
    table = None if key.table == "centred" else torch.tensor(TABLES[key.table]) * UNITS[key.table]
    bias = None if matrix.bias is None else matrix.bias.to(torch.float32, copy=True)
    order = None if matrix.order is None else matrix.order.clone()
    run = native.function("inferd_quantized_tiles")

    def apply(x: Tensor) -> Tensor:
        assert x.shape[1] == in_size and x.dtype == torch.bfloat16
        x = x.contiguous()
        out = torch.empty((x.shape[0], out_size), dtype=out_dtype)
        run(
            x.data_ptr(),
            x.shape[0],
            in_size,
            out_size,
            numbers.data_ptr(),
            is_short,
            address(scales),
            SCALE_TYPES[key.scales],
            address(zeros),
            address(minimums),
            address(table),
            address(bias),
            address(order),
            num_groups,
            key.group_size.bit_length() - 1 if key.group_size else _ALL,
            out.data_ptr(),
            native.DTYPE_CODES[out_dtype],
            torch.get_num_threads(),
        )
        return out

    return apply
