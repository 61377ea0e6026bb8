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
    out_size, in_size = q.shape
    num_panels = -(-out_size // _PANEL)

    def pack(packed: Tensor) -> None:
        own, threads = q.contiguous(), torch.get_num_threads()
        native.function("inferd_linear_fp8_pack")(own.data_ptr(), packed.data_ptr(), out_size, in_size, threads)

    packed = pages.filled(num_panels * in_size * _PANEL, torch.uint8, pack)
    group_size = in_size if scales.dim() == 1 else BLOCK
    rows_a_scale = 1 if scales.shape[0] == out_size else BLOCK
    num_groups = 1 if scales.dim() == 1 else scales.shape[1]

    def widen(packed: Tensor) -> None:
        rows = scales.view(-1, num_groups) * _WIDENED
        if rows_a_scale == 1:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, -out_size % _PANEL))
            rows = rows.view(num_panels, _PANEL, num_groups).transpose(1, 2)
        packed.view(rows.shape).copy_(rows)

    num_rows = num_panels * _PANEL if rows_a_scale == 1 else scales.shape[0]
    wide_scales = pages.filled(num_rows * num_groups, torch.float32, widen)
    added = None if bias is None else pages.copied(bias, torch.float32)
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
