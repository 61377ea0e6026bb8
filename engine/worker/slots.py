"""State of each running request that the worker keeps between steps, by slot: ids so far, block table, parameters.

A sampled id is written here on the device, and the next step reads its input from here. So the host may learn the id a
step later. `Batch` holds one step's input tensors, all built from the plan's rows in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.sched.plan import Admission, Row, StepPlan, TableUpdate
from inferd.engine.worker.device import Device
from inferd.kernels.ops.paged_attention import AttentionBatch
from inferd.kernels.ops.states import StateRows


class Slots:
    """State of `num_slots` requests of at most `max_model_len` tokens, with a block table for each cache group."""

    def __init__(
        self, num_slots: int, max_model_len: int, block_size: int, device: Device, num_groups: int = 1
    ) -> None:
        table_shape = (num_groups, num_slots, -(-max_model_len // block_size))
        self._device, self.max_model_len = device, max_model_len
        self.token_ids = torch.zeros((num_slots, max_model_len + 1), dtype=torch.int64, device=device.torch_device)
        """[slots, max_model_len + 1]: ids of prompt and output, by position."""
        self.block_tables = torch.zeros(table_shape, dtype=torch.int32, device=device.torch_device)
        """[groups, slots, blocks]: entry i is the block of positions i * block_size .. (i + 1) * block_size. Entries
        that a group's window has left behind are stale: they may name another request's blocks."""
        self._admissions: list[Admission | None] = [None] * num_slots

    def of_group(self, group: int) -> Slots:
        """The same slots with the block tables of one cache group."""
        shared = copy(self)
        shared.block_tables = self.block_tables[group : group + 1]
        return shared

    @property
    def num_slots(self) -> int:
        return len(self._admissions)

    def admit(self, admission: Admission) -> None:
        """Fill a slot with a new request."""
        self._admissions[admission.slot] = admission
        self.token_ids[admission.slot, : len(admission.token_ids)] = self._device.to_device(admission.token_ids)

    def extend_table(self, update: TableUpdate) -> None:
        ids = self._device.to_device(update.block_ids, torch.int32)
        self.block_tables[update.group, update.slot, update.first : update.first + len(update.block_ids)] = ids

    def write_drafts(self, rows: Sequence[Row]) -> None:
        """Put drafts at their positions. The tokens that are drawn overwrite them."""
        for row in rows:
            if row.draft_ids:
                first = row.start + 1
                drafts = self._device.to_device(row.draft_ids)
                self.token_ids[row.slot, first : first + len(row.draft_ids)] = drafts

    def params(self, slot: int) -> SamplingParams:
        return self._admitted(slot).params

    def num_prompt(self, slot: int) -> int:
        return self._admitted(slot).num_prompt

    def gather_ids(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The ids at (slot, position), [T] each."""
        return self.token_ids[slots, positions]

    def write_ids(self, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        """Record sampled ids at the positions they were drawn for, [R] each."""
        self.token_ids[slots, positions] = ids

    def _admitted(self, slot: int) -> Admission:
        admission = self._admissions[slot]
        assert admission is not None, f"slot {slot} was never filled"
        return admission


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of T tokens in R rows."""

    token_ids: Tensor
    """[T] int64."""
    attention: tuple[AttentionBatch, ...]
    """One for each cache group; they differ in their block tables only."""
    slots: Tensor
    """[R] int64: the rows' slots."""
    token_slots: Tensor
    """[T] int64: the same for each token."""
    num_kept: Tensor | None = None
    """[R] int32: number of the rows' tokens without drafts; None if nothing is drafted."""

    @property
    def state_rows(self) -> StateRows:
        """The rows as layers with a recurrent state need them."""
        return StateRows(self.attention[0].query_start, self.attention[0].positions, self.slots, self.num_kept)

    @classmethod
    def build(
        cls, plan: StepPlan, slots: Slots, block_size: int, device: Device, *, is_deterministic: bool = True
    ) -> Batch:
        row_slots = device.to_device([row.slot for row in plan.rows])
        lens = [row.num_tokens for row in plan.rows]
        spans = [(row.start, row.num_tokens) for row in plan.rows]
        attention = tuple(
            AttentionBatch.build(spans, tables, block_size, device.torch_device, is_deterministic=is_deterministic)
            for tables in slots.block_tables.index_select(1, row_slots)
        )
        token_slots = row_slots.repeat_interleave(device.to_device(lens), output_size=sum(lens))
        token_ids, num_kept = slots.gather_ids(token_slots, attention[0].positions), None
        if plan.has_drafts:
            num_kept = device.to_device([row.num_tokens - row.num_drafts for row in plan.rows], torch.int32)
        return cls(token_ids, attention, row_slots, token_slots, num_kept)
