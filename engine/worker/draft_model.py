"""The draft model: a small model that drafts the next tokens of rows, which the served model then verifies.

It has a KV pool of its own, with as many blocks of as many tokens as the served model's. The block tables of the
served model's first cache group address both pools. Its KV is computed when drafts need it: a row says from which
position on. Blocks of a shared prefix may be computed more than once, each time with the same content.

Drafts are drawn with the request's own noise, temperature and cuts, without rules and masks. A token that both models
find likely is then drawn by both, at any temperature. With several ranks there is no draft model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from inferd.engine.models.loader import Progress
from inferd.engine.sched.plan import Row
from inferd.engine.worker.drafter import Drafter
from inferd.engine.worker.graphs import StepGraphs, compute_layers
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.slots import Batch, Span

_FEW = 4
"""Most positions before a row's first draft that are computed as rows of the first pass. More are chunks."""


class DraftModel(Drafter):
    """A decoder that drafts."""

    def __init__(self, model: LoadedModel, *, max_step_tokens: int, max_draws: int) -> None:
        """`model`: the draft model, with the slots and the sampler of the served one. `max_step_tokens`: most tokens
        that are computed at once. `max_draws`: most rows of a pass."""
        super().__init__(model.decoder.arch, model.slots)
        self._model, self._max_step_tokens = model, max_step_tokens
        self._graphs = StepGraphs(model, max_draws=max_draws, draw=self._draw)

    def record_steps(self, progress: Progress) -> None:
        self._graphs.record_all(progress)

    def draft(self, rows: Sequence[Row]) -> None:
        self._compute([(row.slot, row.draft_start, row.start - row.draft_start) for row in rows])
        for number in range(max(row.num_to_draft for row in rows)):
            self._pass([row for row in rows if row.num_to_draft > number], number)

    def _draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The draw at the end of a recorded pass."""
        token_ids = self._model.sampler.draft_recorded(logits, slots, positions)
        return token_ids, token_ids

    def _compute(self, spans: Sequence[Span]) -> None:
        """Compute the positions of long spans, in chunks."""
        for slot, start, count in spans:
            if count <= _FEW:
                continue
            for first in range(start, start + count, self._max_step_tokens):
                self._forward([(slot, first, min(self._max_step_tokens, start + count - first))])

    def _pass(self, rows: Sequence[Row], number: int) -> None:
        """Draw draft `number` of each row. The first pass also computes the few positions that are left before."""
        tokens, last = list[tuple[int, int]](), list[int]()
        for row in rows:
            at = row.start + number
            is_behind = number == 0 and row.start - row.draft_start <= _FEW
            tokens += [(row.slot, position) for position in range(row.draft_start if is_behind else at, at + 1)]
            last.append(len(tokens) - 1)
        known = self._slots.gather_ids(*self._next_places(tokens)) if len(last) < len(tokens) else None
        decoded = self._graphs.decode(tokens)
        if decoded is not None and decoded.outcomes is not None:
            if known is not None:
                # A recorded pass draws behind all its tokens. What follows the others is known.
                self._restore(tokens, last, known)
            return
        if decoded is not None:
            logits = decoded.logits if known is None else decoded.logits.index_select(0, self._device.to_device(last))
        else:
            hidden = self._forward([(slot, position, 1) for slot, position in tokens])
            logits = self._model.decoder.logits(hidden.index_select(0, self._device.to_device(last)))
        slots, drawn_at = [row.slot for row in rows], [row.start + number + 1 for row in rows]
        ids = self._model.sampler.draft(logits, slots, drawn_at)
        self._slots.write_ids(self._device.to_device(slots), self._device.to_device(drawn_at), ids)

    def _next_places(self, tokens: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        return self._slots.on_device([(slot, position + 1) for slot, position in tokens])

    def _restore(self, tokens: Sequence[tuple[int, int]], last: Sequence[int], known: Tensor) -> None:
        """Put back the tokens behind all but the `last` of each row."""
        behind = [index for index in range(len(tokens)) if index not in set(last)]
        slots, positions = self._next_places([tokens[index] for index in behind])
        self._slots.write_ids(slots, positions, known.index_select(0, self._device.to_device(behind)))

    def _forward(self, spans: Sequence[Span]) -> Tensor:
        """Final hidden states [T, hidden] of these positions, call by call."""
        batch = Batch.of_spans(self._slots, spans, is_deterministic=self._model.is_deterministic)
        return compute_layers(self._model, batch)
