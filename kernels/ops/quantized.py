"""A quantized matrix as `linear_int4` and `linear_int8` take it: its layout, its checks, and its product in plain
PyTorch, which is exact and slow.

    w[n, k] = scales[n, k // G] * value(q[n, k]) + offset[n, k // G]

The offset is 0 (symmetric), -zeros * scales, or minimums. Scales and minimums may be signed bytes, each times a factor
of its block of 256 inputs; the products are exact. Activations are quantized to 8 bits in groups of their own, each
inside one group of the weights, or to 8 or 16 bits with one scale a row. With h over the groups of activations in g,
the product in fp32 is

    part[g]   = sum h: x_scale[h] * (sum k in h: x_q[k] * (value[k] - zero[g]))
    x_part[g] = sum h: x_scale[h] * (sum k in h: x_q[k])
    y         = (sum g: scale[g] * part[g] + minimum[g] * x_part[g]) + bias.

Activations of 16 bits are 254 high + low, of signed bytes. Then y is the sum of the high bytes' product and the low
bytes', each with its scale, plus the bias.

Sums over k are exact integers. The others begin at 0 and add their products in order, by fused multiply-adds. So a
row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, overload, runtime_checkable

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops import int_dot

SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUP_SIZES = (16, 32, 64, 128)
"""Inputs that may share a scale, unless a row has only one (a channel)."""
BLOCK_SIZE = 256
"""Inputs whose scales share a factor, if scales are bytes."""
X_GROUP_SIZES = (16, 32, 64, 128)
"""Inputs whose activations of 8 bits may share a scale. An outlier spoils no more than its group."""
_USUAL_X_GROUP_SIZE = 32
"""The default is at most so many."""
ROW_OF_BYTES, WIDE_ROW = -1, 0
"""In place of a number of inputs: all activations of a row share a scale, in 8 bits or in 16."""

Table = Literal["centred", "e2m1", "iq4nl"]
"""The 16 values of a 4-bit number."""
TABLES: dict[str, tuple[int, ...]] = {
    "centred": tuple(range(-8, 8)),
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
"""Values by table. Those of e2m1 are doubled, so that they are integers."""
UNITS = {"centred": 1.0, "e2m1": 0.5, "iq4nl": 1.0}
"""Worth of 1 in a table."""

Offsets = Literal["none", "zeros", "minimums"]
NARROWED = {2: 16, 3: 16, 5: 32, 6: 16}
"""Bits other than 4 and 8 that numbers may take, and the inputs that share a scale then."""


def has_wide_rows(device_type: str) -> bool:
    """Whether products of 8 bits are best with one scale a row and activations of 16 bits: on processors with AMX.

    Their tiles sum a whole row before a scale applies, so twice the products take less time than scales by groups. 512
    rows times 8,192 x 2,048 take 9.6 ms, 15.1 by groups of 32 activations, and 8.7 in bfloat16 (2 cores of an Intel
    Xeon, 2026-11-24).
    """
    return device_type == "cpu" and native.level() == "amx"


class Key(NamedTuple):
    """Everything that implementations decide by."""

    device_type: str
    dtype: torch.dtype
    """Dtype of activations. Results have it too, or are float32."""
    group_size: int = 0
    """Inputs that share a scale; 0: each row has one scale."""
    scales: torch.dtype = torch.float32
    offsets: Offsets = "none"
    table: Table = "centred"
    has_order: bool = False
    x_group_size: int = 0
    """Inputs whose activations share a scale, or one of `ROW_OF_BYTES` and `WIDE_ROW`."""
    is_invariant: bool = False
    """Whether a row's bits must depend on that row alone, on a GPU too."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A quantized matrix W [N, K] and its bias. Tensors are read while a layer is bound, and not afterwards."""

    q: Tensor
    """[N, K]: uint8 in 0..15 for 4 bits, int8 for 8 bits."""
    scales: Tensor
    """[N, K / G] bf16, fp16 or fp32; int8 with `block_scales`."""
    bias: Tensor | None
    """[N] of any float dtype."""
    zeros: Tensor | None = None
    """[N, K / G] of any integer dtype: the q of weight 0. Then values are q itself."""
    minimums: Tensor | None = None
    """[N, K / G] of the scales' dtype: the weight of q = 0. Then values are q itself."""
    order: Tensor | None = None
    """[K] int32: x[:, order] meets the columns of q."""
    table: Table = "centred"
    """Values of 4-bit numbers in a symmetric matrix."""
    x_group_size: int | None = None
    """Inputs whose activations share a scale: one of `X_GROUP_SIZES`, `ROW_OF_BYTES` or `WIDE_ROW`. 64 and 128 divide
    K, and q has 8 bits. None: `WIDE_ROW` if `has_wide_rows` and q has symmetric 8 bits with one scale a row; else as
    many as the weights' group has, at most 32."""
    block_scales: Tensor | None = None
    """[N, K / 256] fp16: the factors of scales in int8."""
    block_minimums: Tensor | None = None
    """[N, K / 256] fp16: those of minimums in int8."""
    narrowed_to: int | None = None
    """Bits that hold all values: 5 in groups of 32, or 2, 3 or 6 in groups of 16. Values have no sign if there are
    minimums. If values have 2 bits, scales and minimums are bytes in 0..15. None: q needs all of its bits. On CPUs q
    takes so many."""

    def __post_init__(self) -> None:
        (out_size, in_size), num_groups = self.q.shape, self.scales.shape[1]
        assert self.scales.shape[0] == out_size, "scales"
        assert num_groups == 1 or (self.group_size in GROUP_SIZES and num_groups * self.group_size == in_size), (
            f"{in_size} inputs in {num_groups} groups: a group has {GROUP_SIZES} inputs or all of them"
        )
        assert self.table == "centred" or (self.is_symmetric and self.q.dtype == torch.uint8), "table"
        if self.zeros is not None:
            assert self.zeros.shape == self.scales.shape and self.minimums is None, "zeros"
        if self.minimums is not None:
            assert self.minimums.shape == self.scales.shape and self.minimums.dtype == self.scales.dtype, "minimums"
        if self.block_scales is None:
            assert self.scales.dtype in SCALE_DTYPES and self.block_minimums is None, "scales"
        else:
            factors = self.block_scales if self.block_minimums is None else self.block_minimums
            assert self.scales.dtype == torch.int8 and factors.dtype == self.block_scales.dtype == torch.float16
            assert factors.shape == self.block_scales.shape == (out_size, in_size // BLOCK_SIZE), "block_scales"
            assert in_size % BLOCK_SIZE == 0 and BLOCK_SIZE % self.group_size == 0, "block_scales"
            assert (self.block_minimums is None) == (self.minimums is None), "block_minimums"
        if self.narrowed_to is not None:
            dtype = torch.uint8 if self.narrowed_to < 4 else torch.int8
            assert self.q.dtype == dtype and self.zeros is None and self.table == "centred", "narrowed_to"
            assert self.narrowed_to != 2 or self.block_minimums is not None, "narrowed_to"
            assert NARROWED[self.narrowed_to] == self.group_size == self.chosen_x_group_size, "narrowed_to"
        if self.order is not None:
            assert self.order.shape == (in_size,) and self.order.dtype == torch.int32, "order"
        if self.x_group_size in (ROW_OF_BYTES, WIDE_ROW):
            assert num_groups == 1 and self.is_symmetric and self.q.dtype == torch.int8, "x_group_size"
        elif self.x_group_size is not None:
            assert self.x_group_size in X_GROUP_SIZES, "x_group_size"
            assert num_groups == 1 or self.group_size % self.x_group_size == 0, "x_group_size"
            if self.x_group_size > _USUAL_X_GROUP_SIZE:
                assert in_size % self.x_group_size == 0 and self.q.dtype == torch.int8, "x_group_size"

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.q.shape[1] // self.scales.shape[1]

    @property
    def is_symmetric(self) -> bool:
        return self.zeros is None and self.minimums is None

    @property
    def bits(self) -> int:
        """Bits of a number on CPUs."""
        return self.narrowed_to or (4 if self.q.dtype == torch.uint8 else 8)

    @property
    def lowest(self) -> int:
        """The lowest number in q that has so many bits."""
        if self.minimums is not None or (self.bits == 4 and self.q.dtype == torch.uint8):
            return 0
        return (8 if self.q.dtype == torch.uint8 else 0) - (1 << (self.bits - 1))

    @property
    def has_short_scales(self) -> bool:
        """Whether a scale and a minimum share a byte on CPUs."""
        return self.narrowed_to == 2

    def in_bytes(self) -> Matrix:
        """The same matrix without what only the C++ kernels take: factors of blocks, and 2, 3, 5 or 6 bits."""
        if self.block_scales is None:
            return replace(self, narrowed_to=None)
        return replace(
            self,
            scales=_times(self.scales, self.block_scales),
            minimums=_times(self.minimums, self.block_minimums),
            block_scales=None,
            block_minimums=None,
            narrowed_to=None,
        )

    @property
    def chosen_x_group_size(self) -> int:
        """Inputs whose activations share a scale, or one of `ROW_OF_BYTES` and `WIDE_ROW`."""
        if self.x_group_size is not None:
            return self.x_group_size
        if self.scales.shape[1] > 1:
            return min(self.group_size, _USUAL_X_GROUP_SIZE)
        is_wide = self.is_symmetric and self.q.dtype == torch.int8 and has_wide_rows(self.q.device.type)
        return WIDE_ROW if is_wide else _USUAL_X_GROUP_SIZE

    def key(self, dtype: torch.dtype, *, is_invariant: bool = False) -> Key:
        offsets: Offsets = "none" if self.is_symmetric else "minimums" if self.zeros is None else "zeros"
        group_size = 0 if self.scales.shape[1] == 1 else self.group_size
        return Key(
            self.q.device.type,
            dtype,
            group_size,
            self.scales.dtype,
            offsets,
            self.table,
            self.order is not None,
            self.chosen_x_group_size,
            is_invariant,
        )

    def values(self) -> Tensor:
        """The integers [N, K] int8 that scales multiply."""
        if self.q.dtype == torch.int8 or not self.is_symmetric:
            return self.q.to(torch.int8)
        return torch.tensor(TABLES[self.table], dtype=torch.int8, device=self.q.device)[self.q.long()]

    def dequantized(self) -> Tensor:
        """W in fp64, with columns as q has them."""
        if self.block_scales is not None:
            return self.in_bytes().dequantized()
        values = self.values().double().reshape(*self.scales.shape, self.group_size)
        scales = self.scales.double().unsqueeze(2)
        if self.zeros is not None:
            values = values - self.zeros.double().unsqueeze(2)
        weight = values * (scales * UNITS[self.table])
        return (weight if self.minimums is None else weight + self.minimums.double().unsqueeze(2)).flatten(1)


@overload
def _times(numbers: Tensor, factors: Tensor | None) -> Tensor: ...
@overload
def _times(numbers: None, factors: Tensor | None) -> None: ...
def _times(numbers: Tensor | None, factors: Tensor | None) -> Tensor | None:
    """Numbers [N, K / G] int8 times the factors [N, K / 256] of their blocks: fp32, and exact."""
    if numbers is None or factors is None:
        return None
    return numbers.to(torch.float32) * factors.to(torch.float32).repeat_interleave(
        numbers.shape[1] // factors.shape[1], 1
    )


def rows_of(matrix: Matrix, ids: Tensor) -> Tensor:
    """The rows [T, K] of W in fp32, of a matrix without zero points: scale * value + minimum, each rounded. A row that
    W lacks is NaN."""
    assert matrix.zeros is None and matrix.order is None
    is_known = (ids >= 0) & (ids < len(matrix.q))
    places = torch.where(is_known, ids, 0)

    def own_rows(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[places]

    own = replace(
        matrix,
        q=matrix.q[places],
        scales=matrix.scales[places],
        bias=None,
        minimums=own_rows(matrix.minimums),
        block_scales=own_rows(matrix.block_scales),
        block_minimums=own_rows(matrix.block_minimums),
    ).in_bytes()
    values = own.values().to(torch.float32).reshape(*own.scales.shape, own.group_size) * UNITS[own.table]
    weight = values * own.scales.to(torch.float32).unsqueeze(2)
    if own.minimums is not None:
        weight = weight + own.minimums.to(torch.float32).unsqueeze(2)
    return torch.where(is_known.unsqueeze(1), weight.flatten(1), torch.nan)


Apply = Callable[[Tensor], Tensor]


@runtime_checkable
class HasRows(Protocol):
    """A layer that also gives rows of its matrix."""

    def __call__(self, x: Tensor, /) -> Tensor: ...

    def rows(self, ids: Tensor, dtype: torch.dtype, row_dtype: torch.dtype) -> Tensor:
        """ids [T] int64 -> [T, K] in `dtype`, rounded to `row_dtype` before: scale * value + minimum in fp32. A row
        that the matrix lacks is NaN."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """The layer in plain PyTorch."""

    apply: Callable[[Tensor], Tensor]
    matrix: Matrix

    def __call__(self, x: Tensor) -> Tensor:
        return self.apply(x)

    def rows(self, ids: Tensor, dtype: torch.dtype, row_dtype: torch.dtype) -> Tensor:
        return rows_of(self.matrix, ids).to(row_dtype).to(dtype)


Bind = Callable[[Matrix, torch.dtype], Apply]
"""(matrix, dtype of results: that of activations or float32) -> the layer."""


VARIES = "many rows are multiplied by a library, which chooses a kernel by their number"
"""Why a row's bits depend on the others in the Triton implementation that need not be invariant."""


def refuses_triton(key: Key) -> str | None:
    """Why the faster Triton implementation cannot run; None if it can."""
    return VARIES if key.is_invariant else gpu.refuses(key.device_type, key.dtype)


def refuses_invariant(key: Key) -> str | None:
    """Why the invariant Triton implementation cannot run; None if it can."""
    return gpu.refuses(key.device_type, key.dtype) if key.is_invariant else "serves invariant products only"


def bind(matrix: Matrix, out_dtype: torch.dtype | None = None) -> Apply:
    """The layer in plain PyTorch. Every call walks through the groups in order. Results have the dtype of activations
    by default."""
    stored, matrix = matrix, matrix.in_bytes()
    values, scales = matrix.values(), matrix.scales.to(torch.float32)
    zeros = None if matrix.zeros is None else matrix.zeros.to(torch.int32)
    minimums = None if matrix.minimums is None else matrix.minimums.to(torch.float32)
    added = None if matrix.bias is None else matrix.bias.to(torch.float32)
    out_size, group_size = values.shape[0], matrix.group_size
    chosen = matrix.chosen_x_group_size
    x_group_size = group_size if chosen == ROW_OF_BYTES else chosen

    def wide(x: Tensor) -> Tensor:
        parts = (
            int_dot.product(q, values).to(torch.float32) * scale * scales.T for q, scale in int_dot.quantize_wide(x)
        )
        return next(parts) + next(parts)

    def apply(x: Tensor) -> Tensor:
        x = x if matrix.order is None else x[:, matrix.order.long()]
        if x_group_size == WIDE_ROW:
            total = wide(x)
            return (total if added is None else total + added).to(out_dtype or x.dtype)
        x_q, x_scales = int_dot.quantize(x, x_group_size)
        x_scales = x_scales * UNITS[matrix.table]
        total = torch.zeros((x.shape[0], out_size), device=x.device)
        for group in range(scales.shape[1]):
            part, x_part = torch.zeros_like(total), torch.zeros_like(total[:, :1])
            for start in range(group * group_size, (group + 1) * group_size, x_group_size):
                columns, x_scale = slice(start, start + x_group_size), x_scales[:, start // x_group_size, None]
                x_sum = x_q[:, columns].sum(1, keepdim=True, dtype=torch.int32)
                sums = int_dot.product(x_q[:, columns], values[:, columns])
                if zeros is not None:
                    sums = sums - x_sum * zeros[:, group]
                part = int_dot.fma(sums.to(torch.float32), x_scale, part)
                x_part = int_dot.fma(x_sum, x_scale, x_part)
            total = int_dot.fma(part, scales[:, group], total)
            if minimums is not None:
                total = int_dot.fma(minimums[:, group], x_part, total)
        return (total if added is None else total + added).to(out_dtype or x.dtype)

    return _Layer(apply, stored)
