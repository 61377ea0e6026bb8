"""A quantized matrix as `linear_int4` and `linear_int8` take it: its layout, its checks, and its product in plain
PyTorch, which is exact and slow.

    w[n, k] = scales[n, k // G] * value(q[n, k]) + offset[n, k // G]

The offset is 0 (symmetric), -zeros * scales, or minimums. Activations are quantized to 8 bits in groups of their own,
each inside one group of the weights. A group's sum is an exact integer, and groups are added in order in fp32, so a
row's result depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from inferd.kernels import int_dot

SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUP_SIZES = (16, 32, 64, 128)
"""Inputs that may share a scale, unless a row has only one (a channel)."""
MAX_X_GROUP_SIZE = 128
"""Most inputs whose activations share a scale. An outlier spoils no more than its group."""

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


class Key(NamedTuple):
    """Everything that implementations decide by."""

    device_type: str
    dtype: torch.dtype
    """Dtype of activations and results."""
    group_size: int = 0
    """Inputs that share a scale; 0: each row has one scale."""
    scales: torch.dtype = torch.float32
    offsets: Offsets = "none"
    table: Table = "centred"
    has_order: bool = False


@dataclass(frozen=True, slots=True)
class Matrix:
    """A quantized matrix W [N, K] and its bias. Tensors are read while a layer is bound, and not afterwards."""

    q: Tensor
    """[N, K]: uint8 in 0..15 for 4 bits, int8 for 8 bits."""
    scales: Tensor
    """[N, K / G] bf16, fp16 or fp32."""
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

    def __post_init__(self) -> None:
        (out_size, in_size), num_groups = self.q.shape, self.scales.shape[1]
        assert self.scales.dtype in SCALE_DTYPES and self.scales.shape[0] == out_size, "scales"
        assert num_groups == 1 or (self.group_size in GROUP_SIZES and num_groups * self.group_size == in_size), (
            f"{in_size} inputs in {num_groups} groups: a group has {GROUP_SIZES} inputs or all of them"
        )
        assert self.table == "centred" or (self.is_symmetric and self.q.dtype == torch.uint8), "table"
        if self.zeros is not None:
            assert self.zeros.shape == self.scales.shape and self.minimums is None, "zeros"
        if self.minimums is not None:
            assert self.minimums.shape == self.scales.shape and self.minimums.dtype == self.scales.dtype, "minimums"
        if self.order is not None:
            assert self.order.shape == (in_size,) and self.order.dtype == torch.int32, "order"

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.q.shape[1] // self.scales.shape[1]

    @property
    def is_symmetric(self) -> bool:
        return self.zeros is None and self.minimums is None

    def key(self, dtype: torch.dtype) -> Key:
        offsets: Offsets = "none" if self.is_symmetric else "minimums" if self.zeros is None else "zeros"
        group_size = 0 if self.scales.shape[1] == 1 else self.group_size
        has_order = self.order is not None
        return Key(self.q.device.type, dtype, group_size, self.scales.dtype, offsets, self.table, has_order)

    def values(self) -> Tensor:
        """The integers [N, K] int8 that scales multiply."""
        if self.q.dtype == torch.int8 or not self.is_symmetric:
            return self.q.to(torch.int8)
        return torch.tensor(TABLES[self.table], dtype=torch.int8, device=self.q.device)[self.q.long()]

    def dequantized(self) -> Tensor:
        """W in fp64, with columns as q has them."""
        values = self.values().double().reshape(*self.scales.shape, self.group_size)
        scales = self.scales.double().unsqueeze(2)
        if self.zeros is not None:
            values = values - self.zeros.double().unsqueeze(2)
        weight = values * (scales * UNITS[self.table])
        return (weight if self.minimums is None else weight + self.minimums.double().unsqueeze(2)).flatten(1)


Apply = Callable[[Tensor], Tensor]
Bind = Callable[[Matrix], Apply]


def bind(matrix: Matrix, x_group_size: int) -> Apply:
    """The layer in plain PyTorch. Every call walks through the groups of activations in order."""
    values, scales = matrix.values(), matrix.scales.to(torch.float32)
    zeros = None if matrix.zeros is None else matrix.zeros.to(torch.int32)
    minimums = None if matrix.minimums is None else matrix.minimums.to(torch.float32)
    added = None if matrix.bias is None else matrix.bias.to(torch.float32)
    out_size, in_size = values.shape

    def apply(x: Tensor) -> Tensor:
        x = x if matrix.order is None else x[:, matrix.order.long()]
        x_q, x_scales = int_dot.quantize(x, x_group_size)
        x_scales = x_scales * UNITS[matrix.table]
        total = torch.zeros((x.shape[0], out_size), device=x.device)
        for x_group, start in enumerate(range(0, in_size, x_group_size)):
            columns, group = slice(start, start + x_group_size), start // matrix.group_size
            x_part, x_scale = x_q[:, columns], x_scales[:, x_group, None]
            x_sum = x_part.sum(1, keepdim=True, dtype=torch.int32)
            sums = int_dot.product(x_part, values[:, columns])
            if zeros is not None:
                sums = sums - x_sum * zeros[:, group]
            total = int_dot.fma(sums, scales[:, group] * x_scale, total)
            if minimums is not None:
                total = int_dot.fma(minimums[:, group], x_sum * x_scale, total)
        return (total if added is None else total + added).to(x.dtype)

    return apply
