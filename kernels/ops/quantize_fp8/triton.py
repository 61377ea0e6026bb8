"""The Triton implementation: one program a row, which stays in registers between its maximum and its quotients.

The floor is memory: the inputs once, a byte for each result, 4 bytes a row for the scale, and with the add also the
sum. The largest magnitude is found among bits. Without their sign they order like the numbers, with infinity and then
NaN on top; a maximum of floats would lose NaN. Quotients round by IEEE 754, so the bits equal the reference's. They are
products with the rounded inverse of the scale and one step of correction (Markstein 1990, IBM Journal of Research and
Development 34.1): 3 instructions an element, against 12 for a division. Rows that might overflow on the way, and the
longest rows, are divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.device import FP8_MIN_SM
from inferd.kernels.gpu import DTYPES, Shipped
from inferd.kernels.gpu.rows import as_rows, load_row, row_block
from inferd.kernels.ops.gated_mul.triton import activated

Quantized = tuple[Tensor, Tensor]
_GROUP = tl.constexpr(128)
"""Elements of a row that share a scale, if not all do."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """fp32 as `dtype`. Values too large for 8 bits become +-448; NaN stays."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def _write(value, q, scales, row, size, column, is_inside, HAS_GROUPS: tl.constexpr):
    """Write a row in fp32, with zeros behind its end, as 8 bits and a scale, or a scale for each group."""
    if HAS_GROUPS:
        _write_groups(value, q, scales, row, size, column, is_inside)
    else:
        _write_row(value, q, scales, row, size, column, is_inside)


@triton.jit
def _write_groups(value, q, scales, row, size, column, is_inside):
    NUM_GROUPS: tl.constexpr = value.shape[0] // _GROUP
    group, num_groups = tl.arange(0, NUM_GROUPS), tl.cdiv(size, _GROUP)
    grouped = tl.reshape(value, (NUM_GROUPS, _GROUP))
    magnitude = grouped.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale = tl.div_rn(tl.max(magnitude, 1).to(tl.float32, bitcast=True), 448.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scales + row * num_groups + group, scale, mask=group < num_groups)
    quotient = tl.div_rn(grouped, tl.broadcast_to(scale[:, None], grouped.shape))
    numbers = tl.reshape(cast(quotient, tl.float8e4nv), value.shape)
    tl.store(q + row * size + column, numbers, mask=is_inside)


@triton.jit
def _write_row(value, q, scales, row, size, column, is_inside):
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale = tl.div_rn(tl.max(magnitude, 0).to(tl.float32, bitcast=True), 448.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scales + row, scale)
    if value.shape[0] > 16384:  # 32 numbers a thread: more code would spill
        quotient = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
    elif (scale > 1e-20) & (scale < 1e20):
        inverse = tl.div_rn(tl.full([], 1.0, tl.float32), scale)
        near = value * inverse
        quotient = tl.fma(tl.fma(-near, scale, value), inverse, near)
    else:
        quotient = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
    tl.store(q + row * size + column, cast(quotient, tl.float8e4nv), mask=is_inside)


@triton.jit
def _quantize_fp8(x, q, scales, stride, size, HAS_GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < size
    value = tl.load(x + row * stride + column, mask=is_inside, other=0.0).to(tl.float32)
    _write(value, q, scales, row, size, column, is_inside, HAS_GROUPS)


@triton.jit
def _rms_norm_fp8(
    x, residual, weight, total, q, scales, stride, size, eps, HAS_RESIDUAL: tl.constexpr, HAS_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < size
    value = load_row(x, residual, total, row, stride, size, column, is_inside, HAS_RESIDUAL)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / size + eps)
    factor = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    normed = (value * scale * factor).to(x.dtype.element_ty).to(tl.float32)
    _write(normed, q, scales, row, size, column, is_inside, HAS_GROUPS)


@triton.jit
def _gated_mul_fp8(gate_up, q, scales, size, IS_SILU: tl.constexpr, HAS_GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < size
    place = gate_up + row * (2 * size) + column
    gate = tl.load(place, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(place + size, mask=is_inside, other=0.0).to(tl.float32)
    product = (activated(gate, IS_SILU) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    _write(product, q, scales, row, size, column, is_inside, HAS_GROUPS)


def quantize_fp8(x: Tensor, has_groups: bool) -> Quantized:
    rows, (q, scales) = as_rows(x), _empty(x, x.shape[-1], has_groups)
    block, num_warps = _block(rows.shape[1], has_groups)
    _quantize_fp8[(rows.shape[0],)](
        rows, q, scales, rows.stride(0), rows.shape[1], HAS_GROUPS=has_groups, BLOCK=block, num_warps=num_warps
    )
    return q, scales


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, has_groups: bool) -> Quantized:
    return _norm(x, None, weight, eps, x, has_groups)


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, has_groups: bool
) -> tuple[Quantized, Tensor]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _norm(x, residual.contiguous(), weight, eps, total, has_groups), total


def silu_mul_fp8(gate_up: Tensor, has_groups: bool) -> Quantized:
    return _gate(gate_up, has_groups, is_silu=True)


def gelu_mul_fp8(gate_up: Tensor, has_groups: bool) -> Quantized:
    return _gate(gate_up, has_groups, is_silu=False)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, total: Tensor, has_groups: bool) -> Quantized:
    assert weight.is_contiguous()
    rows, (q, scales) = as_rows(x), _empty(x, x.shape[-1], has_groups)
    block, num_warps = _block(rows.shape[1], has_groups)
    _rms_norm_fp8[(rows.shape[0],)](
        rows,
        rows if residual is None else residual,
        weight,
        total,
        q,
        scales,
        rows.stride(0),
        rows.shape[1],
        eps,
        HAS_RESIDUAL=residual is not None,
        HAS_GROUPS=has_groups,
        BLOCK=block,
        num_warps=num_warps,
    )
    return q, scales


def _gate(gate_up: Tensor, has_groups: bool, is_silu: bool) -> Quantized:
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    q, scales = _empty(gate_up, size, has_groups)
    block, num_warps = _block(size, has_groups)
    _gated_mul_fp8[(gate_up.numel() // (2 * size),)](
        gate_up, q, scales, size, IS_SILU=is_silu, HAS_GROUPS=has_groups, BLOCK=block, num_warps=num_warps
    )
    return q, scales


def _empty(x: Tensor, size: int, has_groups: bool) -> Quantized:
    q = torch.empty((*x.shape[:-1], size), dtype=torch.float8_e4m3fn, device=x.device)
    shape = (*x.shape[:-1], triton.cdiv(size, _GROUP.value)) if has_groups else x.shape[:-1]
    return q, torch.empty(shape, dtype=torch.float32, device=x.device)


def _block(size: int, has_groups: bool) -> tuple[int, int]:
    """(elements that a program covers, warps of a program)."""
    return row_block(max(size, _GROUP.value) if has_groups else size)


_SIZES = {
    _quantize_fp8: (64, 1024, 4096, 16384, 32768),
    _rms_norm_fp8: (1024, 4096, 16384),
    _gated_mul_fp8: (1024, 16384, 32768),
}
"""Row sizes compiled for bfloat16; other dtypes are compiled for 4096."""


def shipped() -> Iterator[Shipped]:
    for dtype in _DTYPES:
        for kernel, sizes in _SIZES.items():
            for size in sizes if dtype == torch.bfloat16 else (4096,):
                for has_groups in (False, True):
                    yield from _forms(kernel, dtype, size, has_groups)


def _forms(kernel: Any, dtype: torch.dtype, size: int, has_groups: bool) -> Iterator[Shipped]:
    """Forms of one kernel for rows of `size`: (op, weight's dtype, constants)."""
    kinds: list[tuple[str, torch.dtype, dict[str, bool]]] = [("quantize_fp8", dtype, {})]
    if kernel is _gated_mul_fp8:
        kinds = [("silu_mul_fp8", dtype, {"IS_SILU": True}), ("gelu_mul_fp8", dtype, {"IS_SILU": False})]
    elif kernel is _rms_norm_fp8:
        kinds = [
            ("add_rms_norm_fp8" if has_residual else "rms_norm_fp8", weight_dtype, {"HAS_RESIDUAL": has_residual})
            for weight_dtype in dict.fromkeys((dtype, torch.float32))
            for has_residual in (False, True)
        ]
    block, num_warps = _block(size, has_groups)
    for op, weight_dtype, constants in kinds:
        types = {
            **dict.fromkeys(("x", "residual", "total", "gate_up"), f"*{DTYPES[dtype]}"),
            "weight": f"*{DTYPES[weight_dtype]}",
            "q": "*fp8e4nv",
            "scales": "*fp32",
            "stride": "i32",
            "size": "i32",
            "eps": "fp32",
        }
        yield Shipped(
            op=op,
            config=f"{DTYPES[dtype]} weight {DTYPES[weight_dtype]} size {size}{' groups' if has_groups else ''}",
            kernel=kernel,
            signature={name: types[name] for name in kernel.arg_names if name in types},
            constants={**constants, "HAS_GROUPS": has_groups, "BLOCK": block},
            num_warps=num_warps,
            is_streaming=size >= 1024,
            multiples=tuple(name for name in ("stride", "size") if name in kernel.arg_names),
            min_sm=FP8_MIN_SM,
        )
