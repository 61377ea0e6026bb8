"""Drafts by a draft head, which reads hidden states of the served model.

At the end of each step, when its tokens are drawn, the head computes the same positions. Position p combines the served
model's hidden states there with the token at p + 1. So the head's KV is always complete. It lies in a pool of its own,
behind the block tables of the served model's first cache group, so prefix hits and preemption need nothing more.

The last position of a shared block was combined with the token that followed it then. Another token may follow it now.
This may cost a draft, and never changes a token.

The head's states at the newest positions of each slot are kept. The first draft of a row is drawn from one of them, and
each further draft takes a pass. With several ranks there is no draft head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inferd.engine.api.memory.activations import HEAD_STATES
from inferd.engine.models.draft_head import DraftHead
from inferd.engine.sample.sampler import Sampler
from inferd.engine.sched.plan import Row
from inferd.engine.worker.drafter import Drafter
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.slots import Batch, Slots, Span
from inferd.engine.worker.step import Step


class HeadDrafts(Drafter):
    """A head that drafts from the hidden states of the served model."""

    def __init__(
        self, head: DraftHead, kv: KVPool, slots: Slots, sampler: Sampler, *, is_deterministic: bool = True
    ) -> None:
        super().__init__(head.arch, slots)
        self._head, self._kv, self._sampler, self._is_deterministic = head, kv, sampler, is_deterministic
        shape = (slots.num_slots * HEAD_STATES, head.arch.hidden_size)
        self._states = torch.zeros(shape, dtype=head.dtype, device=self._device.torch_device)
        """[slots * HEAD_STATES, hidden]: position p of a slot has row p % HEAD_STATES of its rows."""

    def after_draw(self, step: Step, accepted: Callable[[], Sequence[int]]) -> None:
        """Compute the step's positions, for which the head needs the tokens that follow them."""
        assert step.read is not None, "a model with a draft head keeps what it reads"
        rows, kept, places, end = step.plan.rows, list[int](), list[tuple[int, int]](), 0
        states = self._forward([(row.slot, row.start, row.num_tokens) for row in rows], self._head.read(step.read))
        for row in rows:
            end += row.num_tokens
            last = row.start + row.num_tokens
            kept += range(end - row.num_draws, end)
            places += [(row.slot, position) for position in range(last - row.num_draws, last)]
        if kept:
            self._states.index_copy_(0, self._places(places), states.index_select(0, self._device.to_device(kept)))

    def draft(self, rows: Sequence[Row]) -> None:
        """Each draft but the first takes a pass, which is not recorded: it is one layer."""
        states = self._states.index_select(0, self._places([(row.slot, row.start - 1) for row in rows]))
        going = rows
        for number in range(max(row.num_to_draft for row in rows)):
            if number:
                kept = [index for index, row in enumerate(going) if row.num_to_draft > number]
                going = [going[index] for index in kept]
                spans = [(row.slot, row.start + number - 1, 1) for row in going]
                states = self._forward(spans, states.index_select(0, self._device.to_device(kept)))
            drawn_at = [row.start + 1 + number for row in going]
            slots = [row.slot for row in going]
            ids = self._sampler.draft(self._head.logits(states), slots, drawn_at)
            self._slots.write_ids(self._device.to_device(slots), self._device.to_device(drawn_at), ids)

    def _places(self, places: Sequence[tuple[int, int]]) -> Tensor:
        """Rows of `_states` for each (slot, position)."""
        return self._device.to_device([slot * HEAD_STATES + position % HEAD_STATES for slot, position in places])

    def _forward(self, spans: Sequence[Span], states: Tensor) -> Tensor:
        """States [T, hidden] behind these positions, each from the token that follows."""
        batch = Batch.of_spans(self._slots, spans, is_deterministic=self._is_deterministic, num_ahead=1)
        return self._head.forward(batch.token_ids, states, batch.attention[0], self._kv.data, self._kv.scales)
