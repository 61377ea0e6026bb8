"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels import native
from inferd.kernels.int_dot import bound, on_cache_lines
from inferd.kernels.linear_int4.reference import GROUP_SIZE
from inferd.kernels.quantized import Apply, Key, Matrix

_COLUMNS = 16
"""Output columns of a tile."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    out_size, num_groups = weight.shape[0], weight.shape[1] // GROUP_SIZE
    q = torch.empty(weight.shape, dtype=torch.uint8)
    scales = torch.empty((out_size, num_groups), dtype=torch.bfloat16)
    native.function("inferd_linear_int4_quantize")(
        weight.data_ptr(),
        native.DTYPE_CODES[weight.dtype],
        out_size,
        num_groups,
        q.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    return q, scales


def refuses(key: Key) -> str | None:
    if (key.group_size, key.scales) != (GROUP_SIZE, torch.bfloat16):
        return f"takes groups of {GROUP_SIZE} with scales in bfloat16"
    if key.offsets != "none" or key.table != "centred" or key.has_order:
        return "takes symmetric weights with linear values, in their own order"
    return native.refuses(key.device_type, key.dtype)


def bind(matrix: Matrix) -> Apply:
    q, scales = matrix.q.contiguous(), matrix.scales.contiguous()
    out_size, num_groups = scales.shape
    num_columns = -(-out_size // _COLUMNS) * _COLUMNS
    tiles = on_cache_lines(num_columns * num_groups * GROUP_SIZE // 2)
    tile_scales = torch.empty(num_columns * num_groups, dtype=torch.bfloat16)
    native.function("inferd_linear_int4_pack")(
        q.data_ptr(),
        scales.data_ptr(),
        out_size,
        num_groups,
        tiles.data_ptr(),
        tile_scales.data_ptr(),
        torch.get_num_threads(),
    )
    return bound("inferd_linear_int4", num_groups * GROUP_SIZE, num_groups, tiles, tile_scales, matrix.bias, out_size)
