"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels import native
from inferd.kernels.int_dot import bound, on_cache_lines
from inferd.kernels.quantized import Apply, Key, Matrix

_COLUMNS = 32
"""Output columns of a tile."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    out_size, in_size = weight.shape
    q, scales = torch.empty((out_size, in_size), dtype=torch.int8), torch.empty((out_size, 1))
    native.function("inferd_linear_int8_quantize")(
        weight.data_ptr(),
        native.DTYPE_CODES[weight.dtype],
        out_size,
        in_size,
        q.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    return q, scales


def refuses(key: Key) -> str | None:
    if key.group_size or key.scales != torch.float32 or key.offsets != "none" or key.has_order:
        return "takes symmetric weights with one scale in float32 for a row, in their own order"
    return native.refuses(key.device_type, key.dtype)


def bind(matrix: Matrix) -> Apply:
    q, scales = matrix.q.contiguous(), matrix.scales.flatten()
    out_size, in_size = q.shape
    tiles = on_cache_lines(-(-out_size // _COLUMNS) * _COLUMNS * -(-in_size // 4) * 4)
    native.function("inferd_linear_int8_pack")(
        q.data_ptr(), out_size, in_size, tiles.data_ptr(), torch.get_num_threads()
    )
    return bound("inferd_linear_int8", in_size, in_size, tiles, scales.clone(), matrix.bias, out_size)
