"""The ranks that compute one model together, as layers see them: which rows are this rank's, and the others' outputs.

`ALONE` is one process that has everything, so a layer asks nobody how many ranks there are.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from inferd.engine.arch.sharding import ONE_RANK, Rank


class Ranks(Protocol):
    """All ranks, seen from one of them. Every rank makes the same calls in the same order."""

    @property
    def own(self) -> Rank: ...

    def gather(self, part: Tensor, size: int) -> Tensor:
        """[T, columns of this rank] -> [T, size] on every rank. Columns are split by `Rank.span`."""
        ...

    def gather_at_first(self, part: Tensor, size: int) -> Tensor:
        """The same for rank 0 alone. On the others the content of the result is undefined."""
        ...

    def inputs(self, part: Tensor, size: int) -> Tensor:
        """The inputs of `o` or `down` that this rank's part of the matrix reads: [T, columns of this rank] -> all
        `size`, or the same if ranks split the matrix by its inputs."""
        ...

    def outputs(self, part: Tensor, size: int) -> Tensor:
        """All outputs [T, size] of `o` or `down` on every rank, from [T, outputs of this rank]. If ranks split the
        matrix by its inputs, from [T, size], which is added up."""
        ...


class _Alone:
    own = ONE_RANK

    def gather(self, part: Tensor, size: int) -> Tensor:
        return part

    def inputs(self, part: Tensor, size: int) -> Tensor:
        return part

    def outputs(self, part: Tensor, size: int) -> Tensor:
        return part

    def gather_at_first(self, part: Tensor, size: int) -> Tensor:
        return part


ALONE: Ranks = _Alone()
