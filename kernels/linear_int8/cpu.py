"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inferd.kernels import native
from inferd.kernels.int_dot import bound, on_cache_lines

_COLUMNS = 32
"""Output columns of a tile."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    out_size, in_size = weight.shape
    q, scales = torch.empty((out_size, in_size), dtype=torch.int8), torch.empty(out_size)
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


def bind(q: Tensor, scales: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    out_size, in_size = q.shape
    tiles = on_cache_lines(-(-out_size // _COLUMNS) * _COLUMNS * -(-in_size // 4) * 4)
    q = q.contiguous()
    native.function("inferd_linear_int8_pack")(
        q.data_ptr(), out_size, in_size, tiles.data_ptr(), torch.get_num_threads()
    )
    return bound("inferd_linear_int8", in_size, in_size, tiles, scales.clone(), bias, out_size)
