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

_UNITS = 2.0**26
"""Units in 1.0: components are rounded to 7e-9 before they are summed."""
_LARGEST = 2.0**16
"""Largest magnitude of a component in a sum. A text with a larger one fails, as it does with a NaN. 2^20 tokens make
2^62 units at most, which int64 holds."""
_LOW_BITS = 32
"""Bits of a unit times a position that are summed apart from the others: neither sum leaves int64."""


def pooled(hidden: Tensor, lengths: Sequence[int], how: PoolingKind) -> Tensor:
    """Vectors [texts, hidden] fp32 of hidden states [T, hidden] fp32. lengths [texts]: number of tokens of each text,
    at least 1. A vector is NaN if a component was too large to count or NaN."""
    counts = torch.tensor(lengths)
    ends = counts.cumsum(0)
    if how in ("cls", "last"):
        return hidden[ends - counts if how == "cls" else ends - 1]
    if how == "max":
        return torch.stack([part.amax(0) for part in torch.split(hidden, list(lengths))])
    is_counted = hidden.abs() <= _LARGEST  # false for NaN
    whole = hidden.mul(_UNITS).round_().masked_fill_(~is_counted, 0.0).to(torch.int64)
    divisors = counts.to(torch.float64)
    if how == "weightedmean":
        whole *= torch.cat([torch.arange(1, length + 1) for length in lengths])[:, None]
        sums = _sums(whole >> _LOW_BITS, lengths) * 2.0**_LOW_BITS + _sums(whole & (2**_LOW_BITS - 1), lengths)
        divisors = divisors * (divisors + 1.0) / 2.0
    else:
        sums = _sums(whole, lengths)
        divisors = divisors.sqrt() if how == "mean_sqrt_len" else divisors
    is_lost = torch.stack([~part.all() for part in torch.split(is_counted, list(lengths))])
    return (sums / (_UNITS * divisors)[:, None]).to(torch.float32).masked_fill_(is_lost[:, None], float("nan"))


def _sums(whole: Tensor, lengths: Sequence[int]) -> Tensor:
    """[texts, hidden] fp64, from whole numbers [T, hidden]."""
    return torch.stack([part.sum(0) for part in torch.split(whole, list(lengths))]).to(torch.float64)
