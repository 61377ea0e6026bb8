"""A parameter while it is loaded: rows arrive in any order, and the layer receives the tensor when all are there.

A rank keeps only some rows, or some columns of them. Rows are numbered in the whole tensor, and those that the rank
does not keep are dropped.

Memory is allocated when the first row arrives. So a layer that repacks its weight holds two copies of that one matrix,
never of the whole model.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from torch import Tensor

from inferd.engine.arch.sharding import Span


class Parameter:
    """A tensor of `shape` to be filled by rows. `use` receives the kept rows once, when each was written exactly
    once."""

    __slots__ = ("_columns", "_data", "_kept", "_use", "_written", "device", "dtype", "shape")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        use: Callable[[Tensor], None],
        kept: tuple[Span, ...] | None = None,
        columns: Span | None = None,
    ) -> None:
        """`kept`: the rows that are kept, ascending; `columns`: those of them; None: all."""
        self.shape, self.dtype, self.device = shape, dtype, device
        self._use, self._kept = use, ((0, shape[0]),) if kept is None else kept
        self._columns = columns
        self._data: Tensor | None = None
        self._written: list[Span] = []
        """Disjoint ranges of written rows, ascending. Ranges that touch are one, so there are few, although a matrix of
        9,000 rows arrives in 200 pieces."""

    @property
    def missing_rows(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, end) of kept rows that were not written."""
        gaps, row = [], 0
        for start, end in [*self._written, (self.shape[0], self.shape[0])]:
            gaps += [gap for gap, _ in self._overlaps(row, start)]
            row = max(row, end)
        return tuple(gaps)

    def needed(self, row: int, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first row, kept columns) of the kept rows among `values`, which are rows row .. row + n of the whole
        tensor."""
        for (start, end), _ in self._overlaps(row, row + values.shape[0]):
            yield start, self.cut(values[start - row : end - row])

    def cut(self, values: Tensor) -> Tensor:
        """The kept columns of whole rows, as a view."""
        return values if self._columns is None else values[:, slice(*self._columns)]

    def write(self, row: int, values: Tensor, copy: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """Copy `values` [n, ...], the kept columns of rows row .. row + n of the whole tensor, converted to the
        parameter's dtype. Writing a row twice is an error. `copy(goal, values)` copies from the host to the parameter's
        device."""
        end = row + values.shape[0]
        assert row >= 0 and end <= self.shape[0] and tuple(values.shape[1:]) == self._kept_shape[1:]
        self._note_written(row, end)
        overlaps = list(self._overlaps(row, end))
        if not overlaps:
            return
        if self._data is None:
            self._data = torch.empty(self._kept_shape, dtype=self.dtype, device=self.device)
        for (first, last), place in overlaps:
            copy(self._data[place : place + last - first], values[first - row : last - row])
        if not self.missing_rows:
            data, self._data = self._data, None
            self._use(data)

    def give(self, make: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> None:
        """Complete the parameter by what `make` returns for the shape and dtype of the kept rows."""
        self._written = [(0, self.shape[0])]
        self._use(make(self._kept_shape, self.dtype))

    def intercept(self, by: Callable[[Tensor, Callable[[Tensor], None]], None]) -> None:
        """Have `by(data, use)` called in place of `use(data)` when the parameter is complete."""
        use = self._use
        self._use = lambda data: by(data, use)

    def _note_written(self, row: int, end: int) -> None:
        if row == end:
            return
        place = bisect.bisect(self._written, (row, end))
        before, behind = self._written[:place][-1:], self._written[place:][:1]
        assert all(end <= start or stop <= row for start, stop in before + behind), f"rows {row}..{end} written twice"
        first, last = place, place
        if before and before[0][1] == row:
            first, row = place - 1, before[0][0]
        if behind and behind[0][0] == end:
            last, end = place + 1, behind[0][1]
        self._written[first:last] = [(row, end)]

    @property
    def _kept_shape(self) -> tuple[int, ...]:
        shape = self.shape[1:] if self._columns is None else (self._columns[1] - self._columns[0],)
        return (sum(end - start for start, end in self._kept), *shape)

    def _overlaps(self, row: int, end: int) -> Iterator[tuple[Span, int]]:
        """(kept rows within row .. end, place of the first among all kept rows)."""
        places = accumulate((stop - start for start, stop in self._kept), initial=0)
        for (start, stop), place in zip(self._kept, places, strict=False):
            first, last = max(start, row), min(stop, end)
            if first < last:
                yield (first, last), place + first - start
