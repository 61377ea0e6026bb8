"""Unpacks the blocks of GGUF tensors: their integers, scales and minimums, exactly as llama.cpp's reference has them.

Formats: https://github.com/ggml-org/llama.cpp, in ggml/src/ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.engine.arch.gguf.formats import LAYOUTS
from inferd.engine.quant.checkpoints.fp4 import powers_of_two
from inferd.kernels.ops.quantized import TABLES, UNITS

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Groups(NamedTuple):
    """Some blocks as a kernel takes them: in groups of values that share a scale."""

    q: Tensor
    """[n, groups, values of a group]: uint8 in 0..15, or int8."""
    scales: Tensor
    """[n, groups] fp16 or bf16; int8 if blocks have factors."""
    minimums: Tensor | None = None
    """[n, groups] of the scales' dtype."""
    block_scales: Tensor | None = None
    """[n, 1] fp16: the factor of all scales of a block."""
    block_minimums: Tensor | None = None
    """[n, 1] fp16: that of its minimums."""


def unpack(blocks: Tensor, kind: str) -> Groups:
    """Blocks [n, bytes of a block] uint8 of the type `kind`, which is in `LAYOUTS`."""
    return _BY_TYPE[kind](blocks)


def dequantize(blocks: Tensor, kind: str) -> Tensor:
    """Blocks [n, bytes of a block] uint8 of any type -> their values [n, values of a block] fp32."""
    if kind in _FLOATS:
        return blocks.view(_FLOATS[kind]).to(torch.float32)
    q, scales, minimums, block_scales, block_minimums = unpack(blocks, kind)
    numbers, table = q.to(torch.float32), LAYOUTS[kind].table
    if table != "centred":
        numbers = torch.tensor(TABLES[table], dtype=torch.float32, device=q.device)[q.long()] * UNITS[table]
    elif q.dtype == torch.uint8 and minimums is None:
        numbers = numbers - 8
    values = _times(scales, block_scales).unsqueeze(2) * numbers
    if minimums is not None:
        values = values + _times(minimums, block_minimums).unsqueeze(2)
    return values.flatten(1)


def _times(values: Tensor, factors: Tensor | None) -> Tensor:
    """Values of groups times the factors of their blocks, in fp32. Products of bytes and fp16 are exact."""
    values = values.to(torch.float32)
    return values if factors is None else values * factors.to(torch.float32)


def _q4_0(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Groups:
    return Groups(_five_bits(blocks[:, 2:]) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Groups:
    return Groups(_five_bits(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Groups:
    return Groups(blocks[:, 2:].view(torch.int8).unsqueeze(1), _half(blocks, 0))


def _q2_k(blocks: Tensor) -> Groups:
    scales, minimums = ((blocks[:, :16] >> shift & 15).view(torch.int8) for shift in (0, 4))
    q = _shifted(blocks[:, 16:80].reshape(-1, 2, 1, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    return Groups(q, scales, minimums, _half(blocks, 80), -_half(blocks, 82))


def _q3_k(blocks: Tensor) -> Groups:
    packed = blocks[:, 96:108]
    scales = _shifted(packed[:, None, :8], (0, 4), 15).reshape(-1, 16)
    scales = scales | (_shifted(packed[:, None, 8:], (0, 2, 4, 6), 3).reshape(-1, 16) << 4)
    low = _shifted(blocks[:, 32:96].reshape(-1, 2, 1, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    high = _shifted(blocks[:, :32].reshape(-1, 1, 1, 32), tuple(range(8)), 1).reshape(-1, 16, 16)
    # A high bit that is not set stands for -4, and nibbles have 8 added.
    return Groups((low | (high << 2)) + 4, scales.view(torch.int8) - 32, block_scales=_half(blocks, 108))


def _q4_k(blocks: Tensor) -> Groups:
    q = _shifted(blocks[:, 16:].reshape(-1, 4, 1, 32), (0, 4), 15).reshape(-1, 8, 32)
    return Groups(q, *_scales_and_minimums(blocks))


def _q5_k(blocks: Tensor) -> Groups:
    low = _shifted(blocks[:, 48:].reshape(-1, 4, 1, 32), (0, 4), 15).reshape(-1, 8, 32)
    high = _shifted(blocks[:, 16:48].reshape(-1, 1, 1, 32), tuple(range(8)), 1).reshape(-1, 8, 32)
    return Groups((low | (high << 4)).view(torch.int8), *_scales_and_minimums(blocks))


def _q6_k(blocks: Tensor) -> Groups:
    low = _shifted(blocks[:, :128].reshape(-1, 2, 1, 64), (0, 4), 15).reshape(-1, 16, 16)
    high = _shifted(blocks[:, 128:192].reshape(-1, 2, 1, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8)
    return Groups((low | (high << 4)).view(torch.int8) - 32, scales, block_scales=_half(blocks, 208))


def _iq4_nl(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Groups:
    high = blocks[:, 2:4].contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    shifts = torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device)
    low = _shifted(blocks[:, 4:8].reshape(-1, 4, 1, 1), (0, 4), 15).reshape(-1, 8)
    scales = low.to(torch.int32) | (((high >> shifts) & 3) << 4)
    q = _shifted(blocks[:, 8:].reshape(-1, 8, 1, 16), (0, 4), 15).reshape(-1, 8, 32)
    return Groups(q, scales.to(torch.int8) - 32, block_scales=_half(blocks, 0))


def _mxfp4(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 1:]), powers_of_two(blocks[:, :1]))


_BY_TYPE: Mapping[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}  # fmt: skip


def _half(blocks: Tensor, byte: int) -> Tensor:
    """[n, 1]: the fp16 number at `byte` of each block."""
    return blocks[:, byte : byte + 2].contiguous().view(torch.float16)


def _shifted(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """[..., 1, bytes] uint8 -> [..., shifts, bytes]: the bits of each byte from each shift on. A shift and the bits of
    `mask` are at most 8 together, so 8 bytes are shifted at once: torch takes three times as long for single bytes."""
    *shape, num_bytes = packed.shape
    flat = packed.reshape(-1)  # a single block may have any strides
    if num_bytes % 8 or flat.storage_offset() % 8:
        by = torch.tensor(shifts, dtype=torch.uint8, device=packed.device)[:, None]
        return (packed >> by) & mask
    words, masks = flat.view(torch.int64).view(*shape, num_bytes // 8), mask * 0x0101_0101_0101_0101
    return torch.cat([(words >> shift if shift else words) & masks for shift in shifts], -2).view(torch.uint8)


def _nibbles(packed: Tensor) -> Tensor:
    """[n, bytes] -> [n, 1, 2 * bytes]: the low four bits of all bytes, then the high ones."""
    return _shifted(packed[:, None, :], (0, 4), 15).flatten(1).unsqueeze(1)


def _five_bits(packed: Tensor) -> Tensor:
    """[n, 4 + 16] -> [n, 1, 32] int8: the fifth bits, then the low four."""
    fifth = _shifted(packed[:, :4].reshape(-1, 4, 1, 1), tuple(range(8)), 1).reshape(-1, 1, 32)
    return (_nibbles(packed[:, 4:]) | (fifth << 4)).view(torch.int8)


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(scales, minimums [n, 8] int8, their factors [n, 1] fp16) of the groups of 32 of a Q4_K or Q5_K block."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], 1)
    minimums = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], 1)
    return scales.view(torch.int8), minimums.view(torch.int8), _half(blocks, 0), -_half(blocks, 2)
