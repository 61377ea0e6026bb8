"""What pooled requests take from the final hidden states of a step's tokens: the last one's, or the mean of all.

A mean is a running sum over the chunks of a prompt, kept by slot. It is a sum of whole numbers, which is exact: the
same bits in whatever order, chunks and company it is made. Knows no logits and no scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.api.wire.params import Pooling
from inferd.engine.sched.plan import Row, RowStatus
from inferd.engine.worker.slots import Slots

_UNITS = 2.0**26
"""In one: what is summed is rounded to 7e-9."""
_LARGEST = 2.0**16
"""Magnitude of a component beyond which a mean is refused, as it is for a NaN: no fp16 number is as large, and 2^20
tokens of it make 2^62 units, which int64 holds."""
_SUMMED_TOKENS = 256
"""Whose whole numbers exist at once: 8 bytes a component, 8 MiB at 4,096 of them."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """What P rows of a step gave."""

    rows: tuple[int, ...]
    """[P]: places in the plan."""
    asked: tuple[Pooling, ...]
    """[P]."""
    vectors: Tensor
    """[P, hidden] fp32, on the device: neither cut nor normalised, with a NaN where the row failed."""

    def outcomes(self, vectors: Tensor) -> Iterator[tuple[int, RowStatus, bytes]]:
        """(place in the plan, status, embedding) of each, from `vectors` on the host."""
        for row, pooling, vector in zip(self.rows, self.asked, vectors, strict=True):
            if bool(vector.isfinite().all()):
                yield row, RowStatus.OK, _finished(vector, pooling)
            else:
                yield row, RowStatus.NUMERICAL_ERROR, b""


class Pooler:
    """The running sums, and the rows that end a prompt whose hidden states are asked for."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._sums: dict[int, Tensor] = {}
        """By slot: [hidden + 1] int64, units of each component, then how many could not be counted. Of a request that
        was aborted until the slot's next mean: at most one a slot."""

    def pool(self, rows: Sequence[Row], hidden: Tensor, first_tokens: Sequence[int]) -> Pooled | None:
        """hidden [T, hidden] of a plan's rows, whose first tokens lie at `first_tokens`; None where no row ends a
        prompt that is pooled."""
        ended: list[tuple[int, Pooling, Tensor]] = []
        for index, row in enumerate(rows):
            pooling = None if row.samples else self._slots.params(row.slot).pooling
            if pooling is None:
                continue
            first_token = first_tokens[index]
            states = hidden[first_token : first_token + row.num_tokens]
            if pooling.how == "mean":
                self._add(row, states)
            if row.start + row.num_tokens == self._slots.num_prompt(row.slot):
                vector = self._mean(row.slot) if pooling.how == "mean" else states[-1].to(torch.float32)
                ended.append((index, pooling, vector))
        if not ended:
            return None
        indices, asked, vectors = zip(*ended, strict=True)
        return Pooled(indices, asked, torch.stack(vectors))

    def _add(self, row: Row, states: Tensor) -> None:
        if row.start == 0:
            self._sums[row.slot] = states.new_zeros(states.shape[1] + 1, dtype=torch.int64)
        total = self._sums[row.slot]
        for start in range(0, states.shape[0], _SUMMED_TOKENS):
            total += _units(states[start : start + _SUMMED_TOKENS])

    def _mean(self, slot: int) -> Tensor:
        """[hidden] fp32, NaN where a component was none that can be counted."""
        total = self._sums.pop(slot)
        mean = total[:-1].to(torch.float64) / (_UNITS * self._slots.num_prompt(slot))
        return mean.to(torch.float32).masked_fill_(total[-1:] != 0, float("nan"))


def _units(states: Tensor) -> Tensor:
    """[N, hidden] -> [hidden + 1] int64: sums of whole units, and how many components had no such number."""
    exact = states.to(torch.float32)
    is_counted = exact.abs() <= _LARGEST  # not of a NaN
    units = exact.mul(_UNITS).round_().masked_fill_(~is_counted, 0.0).to(torch.int64)
    return torch.cat([units.sum(dim=0), (~is_counted).sum()[None]])


def _finished(vector: Tensor, pooling: Pooling) -> bytes:
    """A pooled state [hidden] on the host as its caller gets it. A vector of zeros has no direction and stays."""
    kept = vector[: pooling.num_components or None].to(torch.float64)
    length = kept.square().sum().sqrt()
    if pooling.is_normalized and length > 0.0:
        kept = kept / length
    return kept.to(torch.float32).numpy().astype("<f4").tobytes()
