"""Calls the C++ products of `kernels/cpu/int_product.h`, which both `linear_int4` and `linear_int8` have."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native, pages
from inferd.kernels.ops.quantized import (
    BLOCK_SIZE,
    ROW_OF_BYTES,
    SCALE_DTYPES,
    TABLES,
    UNITS,
    WIDE_ROW,
    Apply,
    Key,
    Matrix,
)

_COLUMNS, _ROW_COLUMNS = 16, 32
"""Multiples of output columns that memory is made for; the second if activations have one scale a row."""
_SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_SHARED_BYTES = 4
"""Type of scales that share their bytes with the minimums."""
_MAX_UNIT = 32


class IntProduct(native.Product):
    """A product by integers, which also gives rows of its matrix."""

    def rows(self, ids: Tensor, dtype: torch.dtype, row_dtype: torch.dtype) -> Tensor:
        """As of `quantized.HasRows`."""
        ids = ids.contiguous()
        out = torch.empty((ids.shape[0], self.in_size), dtype=dtype)
        native.function(f"{self.name}_rows")(
            ids.data_ptr(),
            out.data_ptr(),
            ids.shape[0],
            native.DTYPE_CODES[dtype],
            *self.others,
            native.WEIGHT_CODES[row_dtype],
        )
        return out


def refuses(key: Key) -> str | None:
    assert key.scales in (*SCALE_DTYPES, torch.int8)
    return native.refuses(key.device_type, key.dtype)


def bind(name: str, matrix: Matrix, out_dtype: torch.dtype) -> Apply:
    """The layer in C++, by the functions `name` and `name`_pack."""
    (out_size, in_size), x_group_size = matrix.q.shape, matrix.chosen_x_group_size
    is_short = matrix.q.dtype == torch.uint8
    is_row = x_group_size in (ROW_OF_BYTES, WIDE_ROW)
    unit, columns = _MAX_UNIT if is_row else min(x_group_size, _MAX_UNIT), _ROW_COLUMNS if is_row else _COLUMNS
    num_columns, padded_in_size = _padded(out_size, columns), _padded(in_size, unit)
    planes = matrix.bits, matrix.lowest

    def pack(tiles: Tensor) -> None:
        q, threads = matrix.q.contiguous(), torch.get_num_threads()
        native.function(f"inferd_{name}_pack")(
            q.data_ptr(), out_size, in_size, x_group_size, *planes, tiles.data_ptr(), threads
        )

    tiles = pages.filled(num_columns * padded_in_size * matrix.bits // 8, torch.uint8, pack)
    shares_bytes = matrix.has_short_scales
    scales = _in_tiles(matrix.scales, num_columns, above=matrix.minimums if shares_bytes else None)
    zeros = _in_tiles(matrix.zeros, num_columns, torch.uint8 if is_short else torch.int16)
    minimums = None if shares_bytes else _in_tiles(matrix.minimums, num_columns)
    block_scales = _in_tiles(matrix.block_scales, num_columns)
    block_minimums = _in_tiles(matrix.block_minimums, num_columns)
    bias = None if matrix.bias is None else pages.copied(matrix.bias, torch.float32)
    order = None if matrix.order is None else pages.copied(matrix.order, torch.int32)
    key = matrix.key(torch.float32)
    table = None if key.table == "centred" else torch.tensor(TABLES[key.table], dtype=torch.int8)
    scale_type = _SHARED_BYTES if shares_bytes else _SCALE_TYPES[key.scales]
    group_size, unit_worth = key.group_size, UNITS[key.table]
    return IntProduct(
        name=f"inferd_{name}",
        in_size=in_size,
        out_size=out_size,
        others=(
            in_size,
            out_size,
            tiles.data_ptr(),
            _address(scales),
            scale_type,
            _address(zeros),
            _address(scales if shares_bytes else minimums),
            *(_address(tensor) for tensor in (block_scales, block_minimums)),
            0 if block_scales is None else (BLOCK_SIZE // group_size).bit_length() - 1,
            *(_address(tensor) for tensor in (bias, order)),
            group_size,
            x_group_size,
            *planes,
            *((_address(table), unit_worth) if is_short else ()),
        ),
        kept=(tiles, scales, zeros, minimums, block_scales, block_minimums, bias, order, table),
        x_dtype=out_dtype,  # a wider copy has the same integers and scales
    )


def _in_tiles(
    values: Tensor | None, num_columns: int, dtype: torch.dtype | None = None, above: Tensor | None = None
) -> Tensor | None:
    """[N, G] of each group as [num_columns / 16, G, 16] in `dtype` (None: its own), with zeros behind the end. `above`:
    numbers of 4 bits that become the high halves of bytes whose low halves are `values`."""
    if values is None:
        return None
    num_tiles, num_groups = num_columns // _COLUMNS, values.shape[1]

    def fill(packed: Tensor) -> None:
        if above is not None:
            assert not bool(((values | above) & ~15).any()), "scales and minimums must be in 0..15"
        own = values if above is None else values | above << 4
        rows = torch.nn.functional.pad(own.to(packed.dtype), (0, 0, 0, num_columns - values.shape[0]))
        packed.view(num_tiles, num_groups, _COLUMNS).copy_(rows.view(num_tiles, _COLUMNS, num_groups).transpose(1, 2))

    packed = pages.filled(num_columns * num_groups, dtype or values.dtype, fill)
    return packed.view(num_tiles, num_groups, _COLUMNS)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
