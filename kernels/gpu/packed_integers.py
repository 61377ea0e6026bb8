"""Matrices of 8-bit or 4-bit integers in the layout that the kernels of `integers` read, and the constants of a layout.

A span is the inputs that are multiplied at once: a group, or 128 inputs of a row with one scale. Weights lie by spans,
and scales by groups, so that the columns of a tile are neighbours in memory. 16 bytes hold 32 inputs of 4 bits: the
first 16 in their low halves, the next 16 in their high halves. So both are operands without a shuffle.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from inferd.kernels.ops.quantized import UNITS, Matrix

STEP = tl.constexpr(128)
"""Inputs of one step of a program."""
HALF = tl.constexpr(16)
"""Inputs side by side in the low halves of 16 bytes."""

NONE, ZEROS, MINIMUMS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_OFFSETS = {"none": 0, "zeros": 1, "minimums": 2}
E2M1 = tl.constexpr(1)
_TABLE_CODES = {"centred": 0, "e2m1": 1, "iq4nl": 2}


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix in this layout."""

    weight: Tensor
    """uint8 [spans, N, bytes of a span]."""
    scales: Tensor
    """[groups, N]. Padding to steps has scales of 0."""
    offsets: Tensor
    """[groups, N] zero points or minimums; the scales if there are neither."""
    in_size: int
    constants: dict[str, Any]

    @classmethod
    def pack(cls, matrix: Matrix) -> Packed:
        matrix = matrix.in_bytes()
        is_short, in_size = matrix.q.dtype == torch.uint8, matrix.q.shape[1]
        num_groups = matrix.scales.shape[1]
        scales = matrix.scales
        if UNITS[matrix.table] != 1.0:
            # Half of a scale is exact but in float16, whose exponents are few.
            scales = (scales.float() if scales.dtype == torch.float16 else scales) * UNITS[matrix.table]
        offsets = matrix.minimums
        if matrix.zeros is not None:
            offsets = matrix.zeros.to(torch.uint8 if is_short else torch.int16)
        key = matrix.key(torch.float32)
        bits, group_size = 4 if is_short else 8, 0 if num_groups == 1 else matrix.group_size
        made = constants(bits, group_size, key.offsets, key.table)
        padding = -in_size % STEP.value
        num_more = padding // group_size if group_size else 0
        by_group = _with_rows(scales.T, num_more)
        return cls(
            _in_spans(matrix.q, bits, made["SPAN"], padding),
            by_group,
            by_group if offsets is None else _with_rows(offsets.T, num_more),
            in_size,
            made,
        )

    @property
    def out_size(self) -> int:
        return self.scales.shape[-1]

    @property
    def layout(self) -> Hashable:
        """Equal for matrices that one kernel multiplies."""
        shapes = self.weight.shape, self.scales.shape
        return shapes, self.scales.dtype, self.offsets.dtype, self.in_size, tuple(self.constants.items())

    @classmethod
    def stacked(cls, packed: Sequence[Packed]) -> Packed:
        """Matrices of one shape and layout, with a first dimension for their number."""
        first = packed[0]
        scales = torch.stack([one.scales for one in packed])
        offsets = scales if first.constants["OFFSETS"] == NONE.value else torch.stack([one.offsets for one in packed])
        return replace(first, weight=torch.stack([one.weight for one in packed]), scales=scales, offsets=offsets)

    def __getitem__(self, index: int) -> Packed:
        """A view of one matrix of a stack."""
        return replace(self, weight=self.weight[index], scales=self.scales[index], offsets=self.offsets[index])


def constants(bits: int, group_size: int, offsets: str, table: str) -> dict[str, Any]:
    """Constants that the kernels of a layout are compiled for. A span has one scale for each half of its bytes."""
    span = STEP.value if group_size == 0 else max(group_size, 2 * HALF.value if bits == 4 else HALF.value)
    return {
        "BITS": bits,
        "GROUP_SIZE": group_size,
        "OFFSETS": _OFFSETS[offsets],
        "TABLE": _TABLE_CODES[table],
        "SPAN": span,
    }


def _with_rows(values: Tensor, num_more: int) -> Tensor:
    """values [groups, N] and rows of zeros behind them."""
    return torch.nn.functional.pad(values, (0, 0, 0, num_more)).contiguous()


def _in_spans(q: Tensor, bits: int, span: int, padding: int) -> Tensor:
    """q [N, K] as uint8 [spans, N, bytes of a span], with `padding` more inputs. A number of 8 bits is stored + 128."""
    padded = torch.nn.functional.pad(q if bits == 4 else q.view(torch.uint8) ^ 128, (0, padding))
    if bits == 4:
        halves = padded.reshape(q.shape[0], -1, 2, HALF.value)
        padded = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return padded.reshape(q.shape[0], -1, span * bits // 8).transpose(0, 1).contiguous()


def name_of(made: dict[str, Any]) -> str:
    """The name of these constants. Codes of 0 have none."""
    group = f"groups of {made['GROUP_SIZE']}" if made["GROUP_SIZE"] else "rows"
    codes = ((_OFFSETS, made["OFFSETS"]), (_TABLE_CODES, made["TABLE"]))
    return " ".join([group, *(name for named, code in codes for name, each in named.items() if each == code != 0)])


def types_of(kernel: Any, made: dict[str, Any], **dtypes: str) -> dict[str, str]:
    """Types of a kernel's arguments by name, with scales in bfloat16."""
    offsets = ("u8" if made["BITS"] == 4 else "i16") if made["OFFSETS"] == _OFFSETS["zeros"] else "bf16"
    tensors = {"x": "", "weight": "u8", "scales": "bf16", "offsets": offsets, "bias": "", "out": ""} | dtypes
    numbers = (name for name in kernel.arg_names if name not in tensors and not name.isupper())
    return {name: f"*{dtype}" for name, dtype in tensors.items() if dtype} | dict.fromkeys(numbers, "i32")
