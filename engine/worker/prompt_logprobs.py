"""Logprobs of prompt tokens, for requests that ask for them: each from the final hidden state before the token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from inferd.engine.sample.logprobs import Logprobs
from inferd.engine.sched.plan import Row, RowResult, TokenLogprobs
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.step import Report, Step, StepPart

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
