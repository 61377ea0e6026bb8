"""Sequences that follow one another without padding, as an encoder's layers read them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences that follow one another without padding."""

    starts: Tensor
    """[sequences + 1] int32: the first token of each, and the number of tokens."""
    positions: Tensor
    """[T] int64: place of each token in its sequence."""
    write_slots: Tensor
    """[T] int64: place of each token among all."""

    @classmethod
    def of(cls, starts: Tensor) -> PackedBatch:
        first = starts[:-1].to(torch.int64).repeat_interleave(starts.diff())
        places = torch.arange(len(first), device=starts.device)
        return cls(starts, places - first, places)


def sequence_means(rows: Tensor, starts: Tensor) -> Tensor:
    """[sequences, columns]: the mean of each sequence's rows, in their dtype. `starts`: as of `PackedBatch`. Every
    sequence has a token."""
    means = [rows[first:end].float().mean(0) for first, end in pairwise(starts.tolist())]
    return torch.stack(means).to(rows.dtype)
