"""A parameter while it is loaded: rows arrive in any order, and the layer receives the tensor when all are there.

Memory is allocated when the first row arrives. So a layer that repacks its weight holds two copies of that one matrix,
never of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Parameter:
    """A tensor of `shape` to be filled by rows. `use` receives it once, when every row was written exactly once."""

    __slots__ = ("_data", "_use", "_written", "device", "dtype", "shape")

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, use: Callable[[Tensor], None]
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._use = use
        self._data: Tensor | None = None
        self._written: list[tuple[int, int]] = []

    @property
    def missing_rows(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, end) of rows that were not written."""
        gaps, row = [], 0
        for start, end in [*sorted(self._written), (self.shape[0], self.shape[0])]:
            if start > row:
                gaps.append((row, start))
            row = max(row, end)
        return tuple(gaps)

    def write(self, row: int, values: Tensor, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """Copy `values` [n, ...] to rows row .. row + n, converted to the parameter's dtype. Writing a row twice is an
        error. `copy(goal, values)` copies from the host to the parameter's device."""
        end = row + values.shape[0]
        assert row >= 0 and end <= self.shape[0] and tuple(values.shape[1:]) == self.shape[1:]
        assert all(end <= start or stop <= row for start, stop in self._written), f"rows {row}..{end} written twice"
        if self._data is None:
            self._data = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        copy(self._data[row:end], values)
        self._written.append((row, end))
        if not self.missing_rows:
            data, self._data = self._data, None
            self._use(data)
