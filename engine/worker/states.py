"""The recurrent states: one tensor for all layers, with the working state of each slot and the checkpoints behind them.

A plan's copies between slots and checkpoints run before and after its rows, in the order of steps.

A row with drafts leaves the state before its first draft. The layers keep the projected inputs of drafts. Once the step
has drawn, the accepted ones advance the state, by the same operations in the same order as tokens that are no drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.layers.recurrent import Drafted, States
from inferd.engine.models.decoder import Decoder
from inferd.engine.sched.plan import Row, StateCopy
from inferd.engine.worker.device import Device
from inferd.engine.worker.step import Step, StepPart
from inferd.kernels.ops.states import StateRows, copy_state


@dataclass(frozen=True, slots=True)
class StatePool:
    """Places 0 .. num_slots - 1 are the working states, and the checkpoints follow."""

    matrices: Tensor
    """[layers, places, heads, ...] fp32: a matrix for each head."""
    inputs: Tensor
    """[layers, places, conv_width - 1, channels] in the model's dtype."""
    num_slots: int
    drafted: Drafted | None = None
    """Inputs that layers keep of drafts for the time of a step."""

    @classmethod
    def allocate(
        cls, arch: Arch, num_slots: int, num_checkpoints: int, dtype: torch.dtype, device: Device, max_drafted: int = 0
    ) -> StatePool | None:
        """The pool of a model with recurrent layers; None for another. `max_drafted`: most drafts of a step."""
        recurrent = arch.recurrent
        if recurrent is None:
            return None
        places = (len(arch.recurrent_layers), num_slots + num_checkpoints)
        matrices = (*places, *recurrent.state_shape)
        inputs = (*places, recurrent.conv_width - 1, recurrent.conv_size)
        drafted = None
        if max_drafted:
            kept = (len(arch.recurrent_layers), max_drafted, sum(recurrent.in_sizes))
            tokens, num_drafts = (torch.zeros(size, dtype=torch.int64) for size in (max_drafted, 1))
            drafted = Drafted(device.empty_pool(kept, dtype), tokens, num_drafts)
        return cls(device.empty_pool(matrices, torch.float32), device.empty_pool(inputs, dtype), num_slots, drafted)

    @property
    def num_bytes(self) -> int:
        drafted = 0 if self.drafted is None else self.drafted.projected.nbytes
        return self.matrices.nbytes + self.inputs.nbytes + drafted

    def of(self, rows: StateRows) -> States:
        """The states as a step's layers see them."""
        return States(rows, self.matrices, self.inputs, self.drafted)

    def expect(self, rows: Sequence[Row]) -> None:
        """Before a step: which of its tokens are drafts, whose projected inputs the layers keep."""
        if self.drafted is None:
            return
        ends = accumulate(row.num_tokens for row in rows)
        tokens = [token for row, end in zip(rows, ends, strict=True) for token in range(end - row.num_drafts, end)]
        self.drafted.tokens[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        self.drafted.num_drafts.fill_(len(tokens))

    def accepted(self, rows: Sequence[Row], num_accepted: Sequence[int]) -> tuple[Tensor, States] | None:
        """(projected inputs [layers, T, in] of the accepted drafts of a step, the states that they advance), for
        `Decoder.advance_states`; None if there are none. Until then a row with drafts has the state before them."""
        assert self.drafted is not None
        kept, positions, slots, ends = list[int](), list[int](), list[int](), [0]
        first = 0
        for row, count in zip(rows, num_accepted, strict=True):
            if count:
                kept += range(first, first + count)
                positions += range(row.start + 1, row.start + 1 + count)
                slots.append(row.slot)
                ends.append(len(kept))
            first += row.num_drafts
        if not kept:
            return None
        query_start = torch.tensor(ends, dtype=torch.int32)
        state_rows = StateRows(query_start, torch.tensor(positions), torch.tensor(slots))
        projected = self.drafted.projected.index_select(1, torch.tensor(kept))
        return projected, States(state_rows, self.matrices, self.inputs)

    def load(self, copies: Iterable[StateCopy]) -> None:
        """Copy checkpoints to slots."""
        for slot, checkpoint_id in copies:
            self._copy(self.num_slots + checkpoint_id, slot)

    def save(self, copies: Iterable[StateCopy]) -> None:
        """Copy the states of slots to checkpoints."""
        for slot, checkpoint_id in copies:
            self._copy(slot, self.num_slots + checkpoint_id)

    def kept(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copies of the states of these slots, for `restore`."""
        return self.matrices[:, list(slots)], self.inputs[:, list(slots)]

    def restore(self, slots: Sequence[int], kept: tuple[Tensor, Tensor]) -> None:
        self.matrices[:, list(slots)], self.inputs[:, list(slots)] = kept

    def _copy(self, source: int, goal: int) -> None:
        for tensor in (self.matrices, self.inputs):
            copy_state(tensor, source, goal)


class RecurrentStates(StepPart):
    """Keeps the states of a decoder's requests as step plans say."""

    def __init__(self, pool: StatePool, decoder: Decoder) -> None:
        self._pool, self._decoder = pool, decoder

    def before_layers(self, step: Step) -> None:
        self._pool.load(step.plan.state_loads)
        self._pool.expect(step.plan.rows)

    def after_layers(self, step: Step) -> None:
        self._pool.save(step.plan.state_saves)

    def after_draw(self, step: Step, accepted: Callable[[], Sequence[int]]) -> None:
        advanced = self._pool.accepted(step.plan.rows, accepted()) if step.plan.has_drafts else None
        if advanced is not None:
            self._decoder.advance_states(*advanced)
