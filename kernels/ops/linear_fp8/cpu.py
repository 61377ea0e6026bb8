"""Calls the C++ implementation (`cpu.cpp`). Activations stay as they are: quantized ones would be less exact, and no
faster."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inferd.kernels.cpu import native, pages
from inferd.kernels.ops.linear_fp8.reference import BLOCK

_PANEL = 64
_WIDENED = 2.0**8
"""The kernel's widened numbers are so many times too small."""


def bind(q: Tensor, scales: Tensor, bias: Tensor | None, _: object) -> Callable[[Tensor], Tensor]:
    """The layer of weights q [N, K]. The originals are not kept."""
    (out_size, in_size), num_threads = q.shape, torch.get_num_threads()
    num_panels = -(-out_size // _PANEL)
    packed = pages.empty(num_panels * in_size * _PANEL)
    q = q.contiguous()
    native.function("inferd_linear_fp8_pack")(q.data_ptr(), packed.data_ptr(), out_size, in_size, num_threads)
    group_size = in_size if scales.dim() == 1 else BLOCK
    rows_a_scale = 1 if scales.shape[0] == out_size else BLOCK
    wide_scales = (scales if scales.dim() == 2 else scales[:, None]) * _WIDENED
    if rows_a_scale == 1:
        wide_scales = torch.nn.functional.pad(wide_scales, (0, 0, 0, -out_size % _PANEL))
        wide_scales = wide_scales.reshape(num_panels, _PANEL, -1).transpose(1, 2)
    wide_scales = wide_scales.contiguous()
    added = None if bias is None else bias.to(torch.float32, copy=True)
    return native.Product(
        name="inferd_linear_fp8",
        in_size=in_size,
        out_size=out_size,
        others=(
            packed.data_ptr(),
            wide_scales.data_ptr(),
            0 if added is None else added.data_ptr(),
            in_size,
            out_size,
            group_size,
            rows_a_scale,
        ),
        kept=(packed, wide_scales, added),
    )
