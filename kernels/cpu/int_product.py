"""Calls the C++ products of `int_product.h`, which both `linear_int4` and `linear_int8` have."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native, pages
from inferd.kernels.ops.quantized import SCALE_DTYPES, TABLES, UNITS, Apply, Key, Matrix

_COLUMNS, _ROW_COLUMNS = 16, 32
"""Multiples of output columns that memory is made for; the second if activations have one scale a row."""
_SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MAX_UNIT = 32


def refuses(key: Key) -> str | None:
    assert key.scales in SCALE_DTYPES
    return native.refuses(key.device_type, key.dtype)


def bind(name: str, matrix: Matrix, out_dtype: torch.dtype) -> Apply:
    """The layer in C++, by the functions `name` and `name`_pack."""
    (out_size, in_size), x_group_size = matrix.q.shape, matrix.chosen_x_group_size
    is_short = matrix.q.dtype == torch.uint8
    unit, columns = x_group_size or _MAX_UNIT, _COLUMNS if x_group_size else _ROW_COLUMNS
    num_columns, padded_in_size = _padded(out_size, columns), _padded(in_size, unit)

    def pack(tiles: Tensor) -> None:
        q, threads = matrix.q.contiguous(), torch.get_num_threads()
        native.function(f"inferd_{name}_pack")(q.data_ptr(), out_size, in_size, x_group_size, tiles.data_ptr(), threads)

    tiles = pages.filled(num_columns * padded_in_size // (2 if is_short else 1), torch.uint8, pack)
    scales = _in_tiles(matrix.scales, num_columns, matrix.scales.dtype)
    zeros = (
        None if matrix.zeros is None else _in_tiles(matrix.zeros, num_columns, torch.uint8 if is_short else torch.int16)
    )
    minimums = None if matrix.minimums is None else _in_tiles(matrix.minimums, num_columns, matrix.minimums.dtype)
    bias = None if matrix.bias is None else pages.copied(matrix.bias, torch.float32)
    order = None if matrix.order is None else pages.copied(matrix.order, torch.int32)
    key = matrix.key(torch.float32)
    table = None if key.table == "centred" else torch.tensor(TABLES[key.table], dtype=torch.int8)
    scale_type, group_size, unit_worth = _SCALE_TYPES[key.scales], key.group_size, UNITS[key.table]
    return native.Product(
        name=f"inferd_{name}",
        in_size=in_size,
        out_size=out_size,
        others=(
            in_size,
            out_size,
            tiles.data_ptr(),
            scales.data_ptr(),
            scale_type,
            *(_address(tensor) for tensor in (zeros, minimums, bias, order)),
            group_size,
            x_group_size,
            *((_address(table), unit_worth) if is_short else ()),
        ),
        kept=(tiles, scales, zeros, minimums, bias, order, table),
        x_dtype=out_dtype,  # a wider copy has the same integers and scales
    )


def _in_tiles(values: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
    """[N, G] of each group as [num_columns / 16, G, 16], with zeros behind the end."""
    num_tiles, num_groups = num_columns // _COLUMNS, values.shape[1]

    def fill(packed: Tensor) -> None:
        rows = torch.nn.functional.pad(values.to(dtype), (0, 0, 0, num_columns - values.shape[0]))
        packed.view(num_tiles, num_groups, _COLUMNS).copy_(rows.view(num_tiles, _COLUMNS, num_groups).transpose(1, 2))

    return pages.filled(num_columns * num_groups, dtype, fill).view(num_tiles, num_groups, _COLUMNS)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
