"""Which tokens rows under a grammar may draw, as bits: applied to their logits before everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.kernels.gpu import from_host
from inferd.kernels.mask_tokens import mask_tokens


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of M of the rows that are drawn."""

    rows: Sequence[int]
    """[M], ascending: places among the rows."""
    words: Tensor
    """[M, ceil(vocabulary / 32)] int32, on the rows' device."""

    def among(self, rows: Sequence[int]) -> Masks:
        """The same masks, by places among `rows`, which hold all that have one."""
        places = {row: place for place, row in enumerate(rows)}
        return Masks([places[row] for row in self.rows], self.words)

    def apply(self, logits: Tensor) -> None:
        """Put out what is not allowed in logits [R, V], fp32, in place."""
        mask_tokens(logits, self.words, from_host(torch.tensor(self.rows, dtype=torch.int64), logits.device))
