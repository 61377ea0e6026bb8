"""The results of a prompt besides its next token, from its final hidden states: pooled ones, and log probabilities.

Embedding requests get the last token's state, or the mean of all. A mean is a running sum over the chunks of a prompt,
kept by slot. It sums whole numbers, which is exact: the bits do not depend on order, chunks or other requests. The log
probability of a prompt's token comes from the state before it. Knows no scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from inferd.engine.api.wire.params import Pooling
from inferd.engine.sample.logprobs import Logprobs
from inferd.engine.sched.plan import Row, RowResult, RowStatus, TokenLogprobs
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.slots import Slots
from inferd.engine.worker.step import Report, Step, StepPart

_UNITS = 2.0**26
"""Units in 1.0: components are rounded to 7e-9 before they are summed."""
_LARGEST = 2.0**16
"""Largest magnitude of a component in a mean; a row with a larger one fails, as it does with a NaN. No fp16 number is
as large, and 2^20 tokens of it make 2^62 units, which int64 holds."""
_SUMMED_TOKENS = 256
"""Number of tokens whose whole numbers exist at once: 8 bytes a component, 8 MiB at 4,096 components."""


class Pooler(StepPart):
    """Holds the running sums, and finds the rows that end a pooled prompt."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._sums: dict[int, Tensor] = {}
        """Slot -> [hidden + 1] int64: units of each component, then the number of components too large to count. An
        aborted request's sum stays until the slot's next mean."""

    def read_hidden(self, step: Step, hidden: Tensor, first_tokens: Sequence[int]) -> None:
        ended, vectors = list[tuple[int, Pooling]](), list[Tensor]()
        for index, row in enumerate(step.plan.rows):
            pooling = None if row.samples else self._slots.params(row.slot).pooling
            if pooling is None:
                continue
            first_token = first_tokens[index]
            states = hidden[first_token : first_token + row.num_tokens]
            if pooling.how == "mean":
                self._add(row, states)
            if row.start + row.num_tokens == self._slots.num_prompt(row.slot):
                ended.append((index, pooling))
                vectors.append(self._mean(row.slot) if pooling.how == "mean" else states[-1].to(torch.float32))
        if ended:
            step.reports.append(Report([torch.stack(vectors)], partial(_report, ended)))

    def _add(self, row: Row, states: Tensor) -> None:
        if row.start == 0:
            self._sums[row.slot] = states.new_zeros(states.shape[1] + 1, dtype=torch.int64)
        total = self._sums[row.slot]
        for start in range(0, states.shape[0], _SUMMED_TOKENS):
            total += _units(states[start : start + _SUMMED_TOKENS])

    def _mean(self, slot: int) -> Tensor:
        """[hidden] fp32; all NaN if a component was too large to count or NaN."""
        total = self._sums.pop(slot)
        mean = total[:-1].to(torch.float64) / (_UNITS * self._slots.num_prompt(slot))
        return mean.to(torch.float32).masked_fill_(total[-1:] != 0, float("nan"))


def _units(states: Tensor) -> Tensor:
    """[N, hidden] -> [hidden + 1] int64: sums of whole units, then the number of components that have none."""
    exact = states.to(torch.float32)
    is_counted = exact.abs() <= _LARGEST  # false for NaN
    units = exact.mul(_UNITS).round_().masked_fill_(~is_counted, 0.0).to(torch.int64)
    return torch.cat([units.sum(dim=0), (~is_counted).sum()[None]])


def _report(ended: Sequence[tuple[int, Pooling]], tensors: Iterator[Tensor], results: list[RowResult]) -> None:
    """Add the embeddings of rows that end a pooled prompt, (index in the plan, parameters) each. A vector that holds a
    NaN makes its row fail."""
    for (index, pooling), vector in zip(ended, next(tensors), strict=True):
        if bool(vector.isfinite().all()):
            results[index] = results[index]._replace(embedding=finished(vector, pooling))
        else:
            results[index] = results[index]._replace(status=RowStatus.NUMERICAL_ERROR)


def finished(vectors: Tensor, pooling: Pooling) -> bytes:
    """The embedding for the client, or one for each token, from vectors [..., hidden] on the host. A vector of zeros
    stays as it is."""
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
