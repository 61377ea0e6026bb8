"""Draws the tokens of a step, writes their ids to the slots, and tells the host what was drawn.

`Sampler` chooses the ids from logits. Which rows of a step draw, and how many of a row's drafts are accepted, is known
here. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.sample.logprobs import Logprobs
from inferd.engine.sample.sampler import EMPTY, FAILED, Masks
from inferd.engine.sched.plan import Row, RowResult, RowStatus, TokenLogprobs, TokenMasks
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.pooling import entries_of
from inferd.engine.worker.step import Step, StepPart
from inferd.kernels.gpu import from_host

_FAULTS = {FAILED: RowStatus.NUMERICAL_ERROR, EMPTY: RowStatus.NOTHING_TO_DRAW}


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that the S sampling rows of a step drew, on the device."""

    rows: Sequence[Row]
    """All rows of the step."""
    drafts: Tensor | None
    """`Step.drafts`, which the host does not know yet."""
    outcomes: Tensor
    """[S] int64: `SampleResult.outcomes`."""
    logprobs: Logprobs | None = None
    logprob_rows: Sequence[int] = ()
    """Index within the S rows that each entry of `logprobs` belongs to."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        ids = [self.outcomes] if self.drafts is None else [self.outcomes, self.drafts]
        return ids if self.logprobs is None else [*ids, *self.logprobs.columns]

    def add(self, tensors: Iterator[Tensor], results: list[RowResult]) -> None:
        """As of `Report`. Rows that do not sample give no id. A row whose logits hold a NaN fails alone."""
        by_row, logprobs, place = self._by_row(tensors), dict[int, TokenLogprobs](), 0
        if self.logprobs is not None:
            entries = entries_of(self.logprobs.with_columns(tensors))
            logprobs = dict(zip(self.logprob_rows, entries, strict=True))
        for index, (row, drawn) in enumerate(by_row):
            if row.samples:
                end = place + len(drawn)
                results[index] = _result_of(row, drawn, [logprobs[i] for i in range(place, end) if i in logprobs])
                place = end

    def accepted(self) -> Sequence[int]:
        """Number of accepted drafts of each row."""
        return [max(_num_given(row, drawn) - 1, 0) for row, drawn in self._by_row(iter(self.tensors))]

    def _by_row(self, tensors: Iterator[Tensor]) -> list[tuple[Row, Sequence[int]]]:
        """Each row with the ids of its drafts, and what it drew."""
        outcomes: list[int] = next(tensors).tolist()
        drafts: list[int] = [] if self.drafts is None else next(tensors).tolist()
        found, place, first_draft = list[tuple[Row, Sequence[int]]](), 0, 0
        for row in self.rows:
            if row.num_to_draft:
                row = row._replace(draft_ids=tuple(drafts[first_draft : first_draft + row.num_to_draft]))
                first_draft += row.num_to_draft
            found.append((row, outcomes[place : place + row.num_draws]))
            place += row.num_draws
        assert place == len(outcomes), f"{len(outcomes)} drawn, {place} planned"
        return found


class Drawing(StepPart):
    """Draws the tokens of steps."""

    def __init__(self, model: LoadedModel) -> None:
        self._slots, self._sampler, self._device = model.slots, model.sampler, model.device

    def before_layers(self, step: Step) -> None:
        for admission in step.plan.admissions:
            self._sampler.fill(admission.slot, admission.params, admission.token_ids, admission.num_prompt)

    def draw(self, step: Step, token_masks: TokenMasks) -> Drawn | None:
        """Draw the sampling rows that the step did not draw itself, and write the ids to their slots. Returns None if
        no row samples."""
        rows, logits, outcomes = step.plan.rows, step.logits, step.outcomes
        if logits is None:
            return None
        draws, masks = _draws_of(rows), self._masks_of(token_masks)
        if outcomes is None:
            return Drawn(rows, step.drafts, *self._sample(draws, logits, masks))
        special = [index for index, (slot, _) in enumerate(draws) if not self._sampler.is_plain(slot)]
        if not special:
            return Drawn(rows, step.drafts, outcomes)
        chosen = self._device.to_device(special)
        masks = None if masks is None else masks.among(special)
        drawn, logprobs, logprob_rows = self._sample(
            [draws[index] for index in special], logits.index_select(0, chosen), masks
        )
        outcomes.index_copy_(0, chosen, drawn)
        return Drawn(rows, step.drafts, outcomes, logprobs, [special[place] for place in logprob_rows])

    def _masks_of(self, masks: TokenMasks) -> Masks | None:
        """The masks on the device."""
        if not masks.draws:
            return None
        words = torch.frombuffer(masks.words, dtype=torch.int32).view(len(masks.draws), -1)
        return Masks(masks.draws, from_host(words, self._device.torch_device))

    def _sample(
        self, draws: Sequence[tuple[int, int]], logits: Tensor, masks: Masks | None
    ) -> tuple[Tensor, Logprobs | None, Sequence[int]]:
        slots, positions = [slot for slot, _ in draws], [position for _, position in draws]
        places = self._slots.on_device(draws)
        # A row's drafts lie in the places of its tokens.
        drafts = self._slots.gather_ids(*places)
        drawn = self._sampler.sample(logits, slots, positions, masks, drafts)
        self._slots.write_ids(*places, drawn.token_ids)
        return drawn.outcomes, drawn.logprobs, drawn.logprob_rows


def _draws_of(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """(slot, position) of each token that a step draws, in the order of its rows."""
    firsts = [row.start + row.num_tokens - row.num_drafts for row in rows]
    return [(row.slot, first + n) for row, first in zip(rows, firsts, strict=True) for n in range(row.num_draws)]


def _num_given(row: Row, drawn: Sequence[int]) -> int:
    """Number of tokens that a row gives. A draw that failed behind accepted drafts is made again by the next step, so
    that it fails alone."""
    count = next((place for place, outcome in enumerate(drawn) if outcome in _FAULTS), len(drawn))
    return row.accepted(drawn[:count])


def _result_of(row: Row, drawn: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> RowResult:
    """The result of a row's draws."""
    if drawn[0] in _FAULTS:
        return RowResult(status=_FAULTS[drawn[0]])
    count = _num_given(row, drawn)
    return RowResult(tuple(drawn[:count]), logprobs=tuple(logprobs[:count]))
