"""Calls the C++ implementation (`cpu.cpp`), for the cases that it supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.kernels.cpu import native, pages

_LANES = 16


def refuses(device_type: str, dtype: torch.dtype, weight_dtype: torch.dtype, out_dtype: torch.dtype) -> str | None:
    """Why it cannot run; None if it can."""
    reason = native.refuses(device_type, dtype, out_dtype)
    if reason is not None:
        return reason
    if weight_dtype != dtype and (dtype != torch.float32 or weight_dtype not in native.WEIGHT_CODES):
        return f"widens bfloat16 and float16 to float32, not {weight_dtype} to {dtype}"
    if out_dtype != dtype:
        return None  # oneDNN needs two products
    return "needs AVX2; these kernels are compiled for any processor" if native.level() == "portable" else None


def bind(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Pack `weight` [N, K], without keeping the original. `dtype` is that of inputs."""
    out_size, in_size = weight.shape
    code, weight_code = native.DTYPE_CODES[dtype], native.WEIGHT_CODES[weight.dtype]
    is_paired = dtype == torch.bfloat16
    in_lanes = -(-in_size // 2) if is_paired else in_size
    if is_paired and native.level() == "amx":
        in_lanes = -(-in_lanes // _LANES) * _LANES

    def pack(packed: Tensor) -> None:
        own, threads = weight.contiguous(), torch.get_num_threads()
        native.function("inferd_linear_pack")(
            own.data_ptr(), packed.data_ptr(), out_size, in_size, code, weight_code, threads
        )

    packed_dtype = torch.int32 if is_paired else weight.dtype
    packed = pages.filled(-(-out_size // _LANES) * _LANES * in_lanes, packed_dtype, pack)
    bias = None if bias is None else pages.copied(bias, dtype)
    is_padded = is_paired and in_size % 2 == 1
    product = _Product(
        name="inferd_linear",
        in_size=in_size + is_padded,
        out_size=out_size,
        others=(
            in_size + is_padded,
            packed.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            in_size,
            out_size,
            weight_code,
            native.DTYPE_CODES[out_dtype],
        ),
        kept=(packed, bias),
        dtype=dtype,
        out_dtype=out_dtype,
    )
    if is_padded:
        return lambda x: product(torch.nn.functional.pad(x, (0, 1)))
    return product


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product(native.Product):
    """Rows of x may lie apart: the first of `others` is the number of elements from one to the next."""

    dtype: torch.dtype
    out_dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self.in_size and x.dtype == self.dtype
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty((x.shape[0], self.out_size), dtype=self.out_dtype)
        self.run(x, out, (x.stride(0), *self.others[1:]))
        return out
