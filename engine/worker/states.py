"""The recurrent states: one tensor for all layers, with the working state of each slot and the checkpoints behind them.

A plan's copies between slots and checkpoints run before and after its rows, in the order of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.layers.gated_delta import States
from inferd.engine.sched.plan import StateCopy
from inferd.engine.worker.device import Device
from inferd.kernels.states import StateRows, copy_state


@dataclass(frozen=True, slots=True)
class StatePool:
    """Places 0 .. num_slots - 1 are the working states, and the checkpoints follow."""

    matrices: Tensor
    """[layers, places, heads, ...] fp32: a matrix for each head."""
    inputs: Tensor
    """[layers, places, conv_width - 1, channels] in the model's dtype."""
    num_slots: int

    @classmethod
    def allocate(
        cls, arch: Arch, num_slots: int, num_checkpoints: int, dtype: torch.dtype, device: Device
    ) -> StatePool | None:
        """The pool of a model with recurrent layers; None for another."""
        recurrent = arch.recurrent
        if recurrent is None:
            return None
        places = (len(arch.recurrent_layers), num_slots + num_checkpoints)
        matrices = (*places, *recurrent.state_shape)
        inputs = (*places, recurrent.conv_width - 1, recurrent.conv_size)
        return cls(device.empty_pool(matrices, torch.float32), device.empty_pool(inputs, dtype), num_slots)

    @property
    def num_bytes(self) -> int:
        return self.matrices.nbytes + self.inputs.nbytes

    def of(self, rows: StateRows) -> States:
        """The states as a step's layers see them."""
        return States(rows, self.matrices, self.inputs)

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
