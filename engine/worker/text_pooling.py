"""Vectors of whole texts, from the hidden states of texts that are packed behind one another.

Sums are of whole numbers, which is exact: the bits of a text's vector do not depend on the texts beside it, nor on the
number of threads. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inferd.engine.api.wire.params import PoolingKind

POOLINGS: tuple[PoolingKind, ...] = ("last", "mean", "cls", "max", "mean_sqrt_len", "weightedmean")

_PLAIN, _BY_POSITION = (2.0**26, 2.0**16), (2.0**20, 2.0**10)
_SUMMED = {"mean": _PLAIN, "mean_sqrt_len": _PLAIN, "weightedmean": _BY_POSITION}
"""Way to pool -> (units in 1.0, largest magnitude of a component). Components are rounded to 7e-9, or to 5e-7 if they
are multiplied by positions. A text with a larger component fails, as it does with a NaN. 2^20 tokens make 2^62 units at
most, or 2^16 tokens with positions, which int64 holds."""


def pooled(hidden: Tensor, lengths: Sequence[int], how: PoolingKind) -> Tensor:
    """Vectors [texts, hidden] fp32 of hidden states [T, hidden] fp32. lengths [texts]: number of tokens of each text,
    at least 1. A vector is NaN if a component was too large to count or NaN."""
    counts = torch.tensor(lengths)
    ends = counts.cumsum(0)
    if how in ("cls", "last"):
        return hidden[ends - counts if how == "cls" else ends - 1]
    if how == "max":
        return torch.stack([part.amax(0) for part in torch.split(hidden, list(lengths))])
    units, largest = _SUMMED[how]
    is_counted = hidden.abs() <= largest  # false for NaN
    whole = hidden.mul(units).round_().masked_fill_(~is_counted, 0.0).to(torch.int64)
    divisors = counts.to(torch.float64)
    if how == "weightedmean":
        whole *= torch.cat([torch.arange(1, length + 1) for length in lengths])[:, None]
        divisors = divisors * (divisors + 1.0) / 2.0
    elif how == "mean_sqrt_len":
        divisors = divisors.sqrt()
    sums = torch.stack([part.sum(0) for part in torch.split(whole, list(lengths))]).to(torch.float64)
    is_lost = torch.stack([~part.all() for part in torch.split(is_counted, list(lengths))])
    return (sums / (units * divisors)[:, None]).to(torch.float32).masked_fill_(is_lost[:, None], float("nan"))
