"""The C++ implementation (`cpu.cpp`): how it is called."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inferd.kernels import native
from inferd.kernels.int_dot import on_cache_lines

_COLUMNS = 32
"""Output columns of a tile."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    out_size, in_size = weight.shape
    q, scales = torch.empty((out_size, in_size), dtype=torch.int8), torch.empty(out_size)
    native.function("inferd_linear_int8_quantize", "piiippi")(
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
    native.function("inferd_linear_int8_pack", "piipi")(
        q.data_ptr(), out_size, in_size, tiles.data_ptr(), torch.get_num_threads()
    )
    scales = scales.clone()
    added = None if bias is None else bias.to(torch.float32, copy=True)
    run = native.function("inferd_linear_int8", "piiipppipi")

    def apply(x: Tensor) -> Tensor:
        assert x.shape[1] == in_size
        x = x.contiguous()
        out = torch.empty((x.shape[0], out_size), dtype=x.dtype)
        run(
            x.data_ptr(),
            native.DTYPE_CODES[x.dtype],
            x.shape[0],
            in_size,
            tiles.data_ptr(),
            scales.data_ptr(),
            None if added is None else added.data_ptr(),
            out_size,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    return apply
