"""The results of a prompt besides its next token, from its final hidden states: pooled ones, logits of a classifier,
and log probabilities.

Embedding requests get the last token's state, or what is kept of all states over the chunks of a prompt. A mean sums
whole numbers, which is exact: the bits do not depend on order, chunks or other requests. The log probability of a
prompt's token comes from the state before it. Knows no scheduling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from inferd.engine.api.wire.params import Pooling, PoolingKind
from inferd.engine.models.pooled_heads import NO_HEADS, Apply, PooledHeads
from inferd.engine.sample.logprobs import Logprobs
from inferd.engine.sched.plan import Row, RowResult, RowStatus, TokenLogprobs
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.slots import Slots
from inferd.engine.worker.step import Report, Step, StepPart

_UNITS = 2.0**26
"""Units in 1.0: components are rounded to 7e-9 before they are summed."""
_LARGEST = 2.0**16
"""Largest magnitude of a component in a sum; a row with a larger one fails, as it does with a NaN. No fp16 number is
as large, and 2^20 tokens of it make 2^62 units, which int64 holds."""
_SUMMED_TOKENS = 256
"""Number of tokens whose whole numbers exist at once: 8 bytes a component, 8 MiB at 4,096 components."""
_LOW_BITS = 32
"""Bits of a unit times a position that are summed apart from those above, because both sums together exceed int64."""


class _Running(Protocol):
    """Pooled states of a prompt so far, chunk by chunk."""

    def add(self, states: Tensor, start: int) -> None:
        """Take the states [N, hidden] of the positions from `start` on."""
        ...

    def vector(self, num_tokens: int) -> Tensor:
        """[hidden] fp32 of a prompt of so many tokens."""
        ...


class _Mean:
    """The sum of all states over the number of tokens, or over its root."""

    def __init__(self, hidden_size: int, device: torch.device, *, is_root: bool = False) -> None:
        self._total = torch.zeros(hidden_size + 1, dtype=torch.int64, device=device)
        """Units of each component, then the number of components too large to count."""
        self._is_root = is_root

    def add(self, states: Tensor, start: int) -> None:
        for units in _units(states):
            self._total += units.sum(dim=0)

    def vector(self, num_tokens: int) -> Tensor:
        divisor = math.sqrt(num_tokens) if self._is_root else num_tokens
        return _divided(self._total.to(torch.float64), divisor)


class _WeightedMean:
    """The mean with the positions, counted from 1, as weights."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        self._totals = torch.zeros(2, hidden_size + 1, dtype=torch.int64, device=device)
        """High and low bits of the sums of `_Mean`, each unit times its position."""

    def add(self, states: Tensor, start: int) -> None:
        for units in _units(states):
            weights = torch.arange(start + 1, start + 1 + units.shape[0], device=units.device)
            weighted = units * weights[:, None]
            self._totals[0] += (weighted >> _LOW_BITS).sum(dim=0)
            self._totals[1] += (weighted & (2**_LOW_BITS - 1)).sum(dim=0)
            start += units.shape[0]

    def vector(self, num_tokens: int) -> Tensor:
        high, low = self._totals.to(torch.float64)
        return _divided(high * 2.0**_LOW_BITS + low, num_tokens * (num_tokens + 1) / 2)


class _Max:
    """The largest of each component."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        self._most = torch.full((hidden_size,), -math.inf, dtype=torch.float32, device=device)

    def add(self, states: Tensor, start: int) -> None:
        self._most = torch.maximum(self._most, states.amax(dim=0).to(torch.float32))

    def vector(self, num_tokens: int) -> Tensor:
        return self._most


class _First:
    """The first token's state."""

    _state: Tensor

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        pass

    def add(self, states: Tensor, start: int) -> None:
        if start == 0:
            self._state = states[0].to(torch.float32)

    def vector(self, num_tokens: int) -> Tensor:
        return self._state


_RUNNING: Mapping[PoolingKind, Callable[[int, torch.device], _Running]] = {
    "mean": _Mean,
    "mean_sqrt_len": partial(_Mean, is_root=True),
    "weightedmean": _WeightedMean,
    "max": _Max,
    "cls": _First,
}
"""The poolings that need more than the last token's state."""


class Pooler(StepPart):
    """Holds what is kept of running prompts, and finds the rows that end a pooled one."""

    def __init__(self, slots: Slots, heads: PooledHeads = NO_HEADS, labels: Apply | None = None) -> None:
        """`heads` change pooled vectors. `labels`: as of `Decoder`; None: no request asks for them."""
        self._slots, self._heads, self._labels = slots, heads, labels
        self._running: dict[int, _Running] = {}
        """By slot. That of an aborted request stays until the slot's next one."""

    def read_hidden(self, step: Step, hidden: Tensor, first_tokens: Sequence[int]) -> None:
        embedded, classified = _Ended(), _Ended()
        for index, row in enumerate(step.plan.rows):
            pooling = None if row.samples else self._slots.params(row.slot).pooling
            if pooling is None:
                continue
            first_token = first_tokens[index]
            states = hidden[first_token : first_token + row.num_tokens]
            is_classified = pooling.gives == "logits"
            running = None if is_classified else self._added(row, states, pooling.how)
            if row.start + row.num_tokens < self._slots.num_prompt(row.slot):
                continue
            if is_classified:
                classified.add(index, pooling, states[-1])
            elif running is None:
                embedded.add(index, pooling, states[-1].to(torch.float32))
            else:
                embedded.add(index, pooling, running.vector(self._slots.num_prompt(row.slot)))
                del self._running[row.slot]
        for ended, computed in ((embedded, self._heads.apply), (classified, self._labels)):
            if ended.rows:
                assert computed is not None, "the model has no classifier"
                step.reports.append(Report([computed(torch.stack(ended.vectors))], partial(_report, ended.rows)))

    def _added(self, row: Row, states: Tensor, how: PoolingKind) -> _Running | None:
        """The pooled states of the row's prompt, with its new ones; None if the last state is enough."""
        if how not in _RUNNING:
            return None
        if row.start == 0:
            self._running[row.slot] = _RUNNING[how](states.shape[1], states.device)
        running = self._running[row.slot]
        running.add(states, row.start)
        return running


@dataclass(slots=True)
class _Ended:
    """The rows of a step that end a pooled prompt, and their vectors."""

    rows: list[tuple[int, Pooling]] = field(default_factory=list)
    """(index in the plan, parameters) of each."""
    vectors: list[Tensor] = field(default_factory=list)

    def add(self, index: int, pooling: Pooling, vector: Tensor) -> None:
        self.rows.append((index, pooling))
        self.vectors.append(vector)


def _units(states: Tensor) -> Iterator[Tensor]:
    """[N, hidden] -> parts of [N, hidden + 1] int64: whole units, then the number of components that have none."""
    for start in range(0, states.shape[0], _SUMMED_TOKENS):
        exact = states[start : start + _SUMMED_TOKENS].to(torch.float32)
        is_counted = exact.abs() <= _LARGEST  # false for NaN
        units = exact.mul(_UNITS).round_().masked_fill_(~is_counted, 0.0).to(torch.int64)
        yield torch.cat([units, (~is_counted).sum(dim=1, keepdim=True)], dim=1)


def _divided(total: Tensor, divisor: float) -> Tensor:
    """[hidden + 1] fp64 of units -> [hidden] fp32; all NaN if a component was too large to count or NaN."""
    return (total[:-1] / (_UNITS * divisor)).to(torch.float32).masked_fill_(total[-1:] != 0, float("nan"))


def _report(ended: Sequence[tuple[int, Pooling]], tensors: Iterator[Tensor], results: list[RowResult]) -> None:
    """Add the vectors of rows that end a pooled prompt, (index in the plan, parameters) each. One with a NaN makes its
    row fail."""
    for (index, pooling), vector in zip(ended, next(tensors), strict=True):
        if bool(vector.isfinite().all()):
            results[index] = results[index]._replace(embedding=finished(vector, pooling))
        else:
            results[index] = results[index]._replace(status=RowStatus.NUMERICAL_ERROR)


def finished(vectors: Tensor, pooling: Pooling) -> bytes:
    """The embedding or the logits for the client, or an embedding for each token, from vectors [..., hidden] on the
    host. A vector of zeros stays as it is."""
    if pooling.gives == "logits":
        return vectors.numpy().astype("<f4").tobytes()
    kept = vectors[..., : pooling.num_components or None].to(torch.float64)
    if pooling.is_normalized:
        lengths = kept.square().sum(dim=-1, keepdim=True).sqrt()
        kept = kept / lengths.masked_fill(lengths == 0.0, 1.0)
    return kept.to(torch.float32).numpy().astype("<f4").tobytes()


_SCORED_ROWS = 32
"""Number of prompt positions whose logits exist at once: 256 with a vocabulary of 152,000 would take over a
gigabyte."""


def entries_of(logprobs: Logprobs) -> tuple[TokenLogprobs, ...]:
    """One for each position. `logprobs` are on the host."""
    return tuple(TokenLogprobs(*entry) for entry in logprobs.to_host())


class PromptLogprobs(StepPart):
    """Scores the prompts of a model's requests."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._num_top: dict[int, int] = {}
        """Slot -> number of alternatives, of requests that ask."""

    def before_layers(self, step: Step) -> None:
        for admission in step.plan.admissions:
            if admission.params.prompt_logprobs is None:
                self._num_top.pop(admission.slot, None)
            else:
                self._num_top[admission.slot] = admission.params.prompt_logprobs

    def read_hidden(self, step: Step, hidden: Tensor, first_tokens: Sequence[int]) -> None:
        for index, row in enumerate(step.plan.rows) if self._num_top else ():
            tables = self._scored(row, hidden, first_tokens[index])
            if tables:
                columns = [column for table in tables for column in table.columns]
                step.reports.append(Report(columns, partial(_add, index, tables)))

    def _scored(self, row: Row, hidden: Tensor, first_token: int) -> list[Logprobs]:
        """Logprobs of the prompt tokens at `start + 1 .. start + num_tokens`."""
        slots, num_top = self._model.slots, self._num_top.get(row.slot)
        if num_top is None:
            return []
        end = min(row.start + row.num_tokens, slots.num_prompt(row.slot) - 1)
        if end <= row.start:
            return []
        targets = slots.token_ids[row.slot, row.start + 1 : end + 1]
        states = hidden[first_token : first_token + targets.shape[0]]
        scored: list[Logprobs] = []
        for start in range(0, states.shape[0], _SCORED_ROWS):
            part, ids = states[start : start + _SCORED_ROWS], targets[start : start + _SCORED_ROWS]
            scored.append(self._model.sampler.prompt_logprobs(self._model.decoder.logits(part), ids, num_top))
        return scored


def _add(index: int, tables: Sequence[Logprobs], tensors: Iterator[Tensor], results: list[RowResult]) -> None:
    entries = tuple(entry for table in tables for entry in entries_of(table.with_columns(tensors)))
    results[index] = results[index]._replace(prompt_logprobs=entries)
