"""Reads the tensors of GGUF files: exactly the numbers that llama.cpp's reference computes from their blocks.

A block holds some values of one row, with scales of their own. Formats: https://github.com/ggml-org/llama.cpp, in
ggml/src/ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from inferd.engine.arch.gguf.tensors import StoredTensor

_PART_VALUES = 2**20
"""Number of values that are computed at once."""
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the 4-bit numbers of IQ4_NL and IQ4_XS."""


def parts(stored: StoredTensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, values of some rows in fp32) of a tensor, in the order of the original checkpoint. Raises `OSError`
    if the file cannot be read."""
    shape, kind, num_heads = stored.tensor.shape, stored.tensor.type, stored.conversion.paired_heads
    num_rows, row_values = shape[0], math.prod(shape[1:])
    head_rows = num_rows // num_heads if num_heads else 1
    step = max(1, _PART_VALUES // (row_values * head_rows)) * head_rows if len(shape) > 1 else num_rows
    stored_bytes = _mapped(stored)
    for row in range(0, num_rows, step):
        end = min(row + step, num_rows)
        first, last = (at * row_values // kind.block_size * kind.block_bytes for at in (row, end))
        values = dequantize(stored_bytes[first:last].view(-1, kind.block_bytes), kind.name).view(-1, *shape[1:])
        if stored.conversion.excess:
            values = values - stored.conversion.excess
        yield row, _unpaired(values, head_rows) if num_heads else values


def _mapped(stored: StoredTensor) -> Tensor:
    """The bytes of the tensor as a view of the file."""
    tensor = stored.tensor
    start = tensor.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with stored.file.open("rb") as file:
        num_bytes = tensor.begin - start + tensor.num_bytes
        # torch wants memory that it may write to. A copy is only made of a page that is written to, and none is.
        pages = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY, offset=start)
    return torch.frombuffer(pages, dtype=torch.uint8, offset=tensor.begin - start, count=tensor.num_bytes)


def _unpaired(values: Tensor, head_rows: int) -> Tensor:
    """The rows of each head in the original order: first those at even places, then those at odd ones."""
    halves = values.view(-1, head_rows // 2, 2, *values.shape[1:]).transpose(1, 2)
    return halves.reshape(values.shape)


def dequantize(blocks: Tensor, kind: str) -> Tensor:
    """Blocks [n, bytes of a block] uint8 of the type `kind` -> their values [n, values of a block] fp32."""
    return _BY_TYPE[kind](blocks)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.float16).to(torch.float32)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.view(torch.bfloat16).to(torch.float32)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).to(torch.float32) - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).to(torch.float32) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_five_bits(blocks[:, 2:]).to(torch.float32) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _five_bits(blocks[:, 4:]).to(torch.float32) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).to(torch.float32)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, numbers = blocks[:, :16], blocks[:, 16:80].reshape(-1, 2, 1, 32)
    scale = _half(blocks, 80) * (scales & 15).to(torch.float32)
    minimum = _half(blocks, 82) * (scales >> 4).to(torch.float32)
    q = _shifted(numbers, (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    return _in_groups(scale, q, minimum)


def _q3_k(blocks: Tensor) -> Tensor:
    high, low, packed = blocks[:, :32].reshape(-1, 1, 1, 32), blocks[:, 32:96].reshape(-1, 2, 1, 32), blocks[:, 96:108]
    scales = _shifted(packed[:, None, :8], (0, 4), 15).reshape(-1, 16)
    scales = scales | (_shifted(packed[:, None, 8:], (0, 2, 4, 6), 3).reshape(-1, 16) << 4)
    scale = _half(blocks, 108) * (scales.to(torch.float32) - 32)
    q = _shifted(low, (0, 2, 4, 6), 3).reshape(-1, 16, 16).to(torch.float32)
    # A bit that is not set stands for -4.
    q = q + (_shifted(high, tuple(range(8)), 1).reshape(-1, 16, 16).to(torch.float32) * 4 - 4)
    return _in_groups(scale, q)


def _q4_k(blocks: Tensor) -> Tensor:
    scale, minimum = _scales_and_minimums(blocks)
    q = _shifted(blocks[:, 16:].reshape(-1, 4, 1, 32), (0, 4), 15).reshape(-1, 8, 32)
    return _in_groups(scale, q, minimum)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, minimum = _scales_and_minimums(blocks)
    low = _shifted(blocks[:, 48:].reshape(-1, 4, 1, 32), (0, 4), 15).reshape(-1, 8, 32)
    high = _shifted(blocks[:, 16:48].reshape(-1, 1, 1, 32), tuple(range(8)), 1).reshape(-1, 8, 32)
    return _in_groups(scale, low | (high << 4), minimum)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _shifted(blocks[:, :128].reshape(-1, 2, 1, 64), (0, 4), 15).reshape(-1, 16, 16)
    high = _shifted(blocks[:, 128:192].reshape(-1, 2, 1, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).to(torch.float32)
    return _in_groups(scale, (low | (high << 4)).to(torch.float32) - 32)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _from_table(_nibbles(blocks[:, 2:]))


def _iq4_xs(blocks: Tensor) -> Tensor:
    high = blocks[:, 2:4].contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    shifts = torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device)
    low = _shifted(blocks[:, 4:8].reshape(-1, 4, 1, 1), (0, 4), 15).reshape(-1, 8)
    scales = low.to(torch.int32) | (((high >> shifts) & 3) << 4)
    scale = _half(blocks, 0) * (scales.to(torch.float32) - 32)
    return _in_groups(scale, _from_table(_shifted(blocks[:, 8:].reshape(-1, 8, 1, 16), (0, 4), 15).reshape(-1, 8, 32)))


_BY_TYPE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip


def _half(blocks: Tensor, byte: int) -> Tensor:
    """[n, 1] fp32: the fp16 number at `byte` of each block."""
    return blocks[:, byte : byte + 2].contiguous().view(torch.float16).to(torch.float32)


def _shifted(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """[..., 1, bytes] uint8 -> [..., shifts, bytes]: the bits of each byte from each shift on."""
    by = torch.tensor(shifts, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed >> by) & mask


def _nibbles(packed: Tensor) -> Tensor:
    """[n, bytes] -> [n, 2 * bytes]: the low four bits of all bytes, then the high ones."""
    return _shifted(packed[:, None, :], (0, 4), 15).flatten(1)


def _five_bits(packed: Tensor) -> Tensor:
    """[n, 4 + 16] -> [n, 32]: the fifth bits, then the low four."""
    fifth = _shifted(packed[:, :4].reshape(-1, 4, 1, 1), tuple(range(8)), 1).flatten(1)
    return _nibbles(packed[:, 4:]) | (fifth << 4)


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """([n, 8], [n, 8]) fp32: the scale and the minimum of each group of 32 of a Q4_K or Q5_K block."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], 1)
    minimums = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], 1)
    return _half(blocks, 0) * scales.to(torch.float32), _half(blocks, 2) * minimums.to(torch.float32)


def _from_table(q: Tensor) -> Tensor:
    return torch.tensor(_IQ4, dtype=torch.float32, device=q.device)[q.to(torch.int64)]


def _in_groups(scale: Tensor, q: Tensor, minimum: Tensor | None = None) -> Tensor:
    """scale * q - minimum, flattened. scale and minimum [n, groups], q [n, groups, values of a group]."""
    values = scale[:, :, None] * q.to(torch.float32)
    return (values if minimum is None else values - minimum[:, :, None]).flatten(1)
