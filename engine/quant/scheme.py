"""Schemes: how a linear layer stores its weight, and which kernel multiplies by it. The layer owns names and shapes.

A scheme for a checkpoint's own quantized format takes other tensors than a scheme that quantizes a weight. Both call
the same kernels, which take numbers and scales from either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from inferd.engine.arch.sharding import Span
from inferd.kernels.ops.linear import ANY, Choices, linear, linear_16bit

Apply = Callable[[Tensor], Tensor]


class QuantizationError(ValueError):
    """The requested scheme cannot store a layer. The message has the shape, the rule, and what would work."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor that a layer needs before it can run, and the matrix rows that it is about."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    first_row: int = 0
    """The matrix row that the tensor's first row belongs to."""
    group_rows: int | None = 1
    """Number of matrix rows that a row of the tensor belongs to; None: every row belongs to the whole matrix."""
    group_columns: int | None = 1
    """Number of matrix columns that a column of the tensor belongs to; None: every column belongs to all of them."""

    def kept(self, rows: Sequence[Span]) -> tuple[Span, ...] | None:
        """The tensor's rows that belong to these rows of the matrix; None: all."""
        size = self.group_rows
        if size is None:
            return None
        assert all((start - self.first_row) % size == 0 for start, _ in rows), "a group of rows is cut"
        shifted = ((start - self.first_row, end - self.first_row) for start, end in rows)
        whole = ((max(start // size, 0), min(-(-end // size), self.shape[0])) for start, end in shifted)
        return tuple((start, end) for start, end in whole if start < end)

    def kept_columns(self, columns: Span) -> Span | None:
        """The tensor's columns that belong to these columns of the matrix; None: all."""
        size = self.group_columns
        if size is None:
            return None
        start, end = columns
        assert start % size == 0, "a group of columns is cut"
        return start // size, min(-(-end // size), self.shape[1])


class Scheme(Protocol):
    """One way to store a weight matrix."""

    @property
    def name(self) -> str: ...

    @property
    def input_group(self) -> int | None:
        """Ranks may split a matrix by its inputs between two groups of so many; None: they may not."""
        ...

    def check(self, out_size: int, in_size: int) -> None:
        """Raises `QuantizationError` for a shape that the scheme cannot store, before anything is loaded."""
        ...

    def takes(self, out_size: int, in_size: int, dtype: torch.dtype) -> Mapping[str, TensorSpec]:
        """The tensors that `bind` needs besides the bias, by their names in the weight map. `dtype` is the dtype of
        activations and results."""
        ...

    @property
    def bind(self) -> Callable[..., Apply]:
        """A function that takes the tensors of `takes` and `bias` ([out] or None) as keywords, and returns the layer:
        x [T, in] -> [T, out]. Its keyword `out_dtype` is the dtype of results: that of x (None), or float32.

        The tensors are needed during the call only, unless the scheme stores them unchanged.
        """
        ...

    def of_rows(self, rows: Sequence[Span]) -> Scheme:
        """The scheme that binds a matrix of which these rows are kept, ascending."""
        ...


class FromWeight:
    """Base of schemes that take the weight [out, in] in the dtype of activations, and convert it themselves."""

    def takes(self, out_size: int, in_size: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec((out_size, in_size), dtype)}

    def of_rows(self, rows: Sequence[Span]) -> Self:
        """Rows are stored independently of each other."""
        return self


def giving(out_dtype: torch.dtype | None, dtype: torch.dtype, bind: Callable[[torch.dtype], Apply]) -> Apply:
    """The layer of x in `dtype` that gives `out_dtype`. `bind(d)` is a layer that quantizes x in d and gives d: from a
    wider copy of x it computes the same."""
    if out_dtype is None or out_dtype == dtype:
        return bind(dtype)
    apply = bind(out_dtype)
    return lambda x: apply(x.to(out_dtype))


class Dense:
    """The weight in the dtype of activations. With `narrow` it keeps 16 bits, and activations are float32."""

    name = "dense"
    input_group: int | None = 1

    def __init__(self, choices: Choices = ANY, narrow: torch.dtype | None = None) -> None:
        self._choices, self._narrow = choices, narrow

    def check(self, out_size: int, in_size: int) -> None:
        """Every shape is allowed."""

    def takes(self, out_size: int, in_size: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        assert self._narrow is None or dtype == torch.float32
        return {"weight": TensorSpec((out_size, in_size), self._narrow or dtype)}

    def of_rows(self, rows: Sequence[Span]) -> Dense:
        """Rows are stored independently of each other."""
        return self

    def bind(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Apply:
        if self._narrow is None:
            return linear(weight, bias, self._choices, out_dtype)
        return linear_16bit(weight, bias)


DENSE = Dense()
