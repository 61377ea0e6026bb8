"""Finds out whether the head that a GGUF file stores is the embedding once more, in another format.

Some converters write a tied head as a tensor of its own, and no field of the file says so. Then the two tensors hold
the same numbers, up to the rounding of their formats. A few rows tell: those of an untied head are unlike those
of the embedding. It knows the formats that files mostly have for these two; another one counts as a head of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from math import sqrt
from typing import BinaryIO

from inferd.engine.api.checkpoint import TensorInfo
from inferd.engine.api.pinned_files import source_of

_NUM_ROWS = 8
_LEAST_COSINE = 0.9
"""Rows of the same numbers in 4 and in 6 bits have 0.99, and unlike rows have about 0."""


def is_stored_twice(embedding: TensorInfo, head: TensorInfo) -> bool:
    """Whether `head` holds the numbers of `embedding`. False if the file holds no weights, as after a
    download of the header alone, or if this file does not know a format."""
    if embedding.shape != head.shape or not {embedding.dtype, head.dtype} <= _DECODERS.keys():
        return False
    try:
        with source_of(embedding.file).open("rb") as first, source_of(head.file).open("rb") as second:
            rows = [place * (embedding.shape[0] // _NUM_ROWS) for place in range(1, _NUM_ROWS)]
            likeness = [_cosine(_values(first, embedding, row), _values(second, head, row)) for row in rows]
    except OSError:
        return False
    return min(likeness) >= _LEAST_COSINE


def _values(file: BinaryIO, stored: TensorInfo, row: int) -> list[float]:
    """The numbers of the first block of a row."""
    assert stored.gguf is not None
    kind, (_, width) = stored.gguf.tensor.type, stored.shape
    file.seek(stored.begin + row * width // kind.block_size * kind.block_bytes)
    block = file.read(kind.block_bytes * max(32 // kind.block_size, 1))
    if len(block) < kind.block_bytes:
        raise OSError("the file ends before the weights")
    return _DECODERS[stored.dtype](block)


def _cosine(some: list[float], others: list[float]) -> float:
    """The cosine of two lists, over as many numbers as the shorter one has; 0 if one is all zeros."""
    pairs = [*zip(some, others, strict=False)]
    sizes = sum(one * one for one, _ in pairs) * sum(other * other for _, other in pairs)
    return sum(one * other for one, other in pairs) / sqrt(sizes) if sizes else 0.0


def _float16(block: bytes, begin: int = 0) -> float:
    value: float = struct.unpack_from("<e", block, begin)[0]
    return value


def _q8_0(block: bytes) -> list[float]:
    scale = _float16(block)
    return [scale * quant for quant in struct.unpack_from("<32b", block, 2)]


def _q4_0(block: bytes) -> list[float]:
    scale, packed = _float16(block), block[2:]
    return [scale * (quant - 8) for quant in [*(byte & 15 for byte in packed), *(byte >> 4 for byte in packed)]]


def _q5_0(block: bytes) -> list[float]:
    scale, high, packed = _float16(block), int.from_bytes(block[2:6], "little"), block[6:]
    low = [*(byte & 15 for byte in packed), *(byte >> 4 for byte in packed)]
    return [scale * ((quant | (high >> place & 1) << 4) - 16) for place, quant in enumerate(low)]


def _q2_k(block: bytes) -> list[float]:
    """The first 32 of 256 numbers: two groups of 16. A byte has a group's scale and its minimum."""
    scale, minimum = _float16(block, 80), _float16(block, 82)
    groups = [(scale * (byte & 15), minimum * (byte >> 4)) for byte in block[:2]]
    return [groups[place // 16][0] * (block[16 + place] & 3) - groups[place // 16][1] for place in range(32)]


def _q3_k(block: bytes) -> list[float]:
    """The same numbers. Their scales lie in 6 bits, the low four apart from the others."""
    scale = _float16(block, 108)
    scales = [scale * ((block[96 + group] & 15 | (block[104 + group] & 3) << 4) - 32) for group in range(2)]
    quants = [(block[32 + place] & 3 | (block[place] & 1) << 2) - 4 for place in range(32)]
    return [scales[place // 16] * quant for place, quant in enumerate(quants)]


def _q4_k(block: bytes) -> list[float]:
    """The first 64 of 256 numbers: two groups of 32, whose scales lie in 6 bits."""
    scale, minimum, scales, packed = _float16(block), _float16(block, 2), block[4:16], block[16:48]
    groups = ([byte & 15 for byte in packed], [byte >> 4 for byte in packed])
    return [
        scale * (scales[index] & 63) * quant - minimum * (scales[index + 4] & 63)
        for index, group in enumerate(groups)
        for quant in group
    ]


def _q6_k(block: bytes) -> list[float]:
    """The first 32 of 256 numbers: two groups of 16."""
    scales, scale = struct.unpack_from("<16b", block, 192), _float16(block, 208)
    quants = [(block[place] & 15 | (block[128 + place] & 3) << 4) - 32 for place in range(32)]
    return [scale * scales[place // 16] * quant for place, quant in enumerate(quants)]


_DECODERS: Mapping[str, Callable[[bytes], list[float]]] = {
    "F32": lambda block: [*struct.unpack_from("<32f", block)],
    "F16": lambda block: [*struct.unpack_from("<32e", block)],
    "Q8_0": _q8_0,
    "Q5_0": _q5_0,
    "Q4_0": _q4_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
