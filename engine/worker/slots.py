"""State of each running request that the worker keeps between steps, by slot: ids so far, block table, parameters.

A sampled id is written here on the device, and the next step reads its input from here. So the host may learn the id a
step later. `Batch` is the one place that puts together what a model's layers read.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.sched.plan import Admission, Row, TableUpdate
from inferd.engine.worker.device import Device
from inferd.engine.worker.step import Step, StepPart
from inferd.kernels.ops.paged_attention import AttentionBatch
from inferd.kernels.ops.states import StateRows
from inferd.kernels.ops.step_inputs import step_inputs

Span = tuple[int, int, int]
"""(slot, first position, number of positions) of a row."""


class Slots(StepPart):
    """State of `num_slots` requests of at most `max_model_len` tokens, with a block table for each cache group."""

    def __init__(
        self, num_slots: int, max_model_len: int, block_size: int, device: Device, num_groups: int = 1
    ) -> None:
        table_shape = (num_groups, num_slots, -(-max_model_len // block_size))
        self.device, self.block_size, self.max_model_len = device, block_size, max_model_len
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

    def before_layers(self, step: Step) -> None:
        for admission in step.plan.admissions:
            self.fill(admission)
        for update in step.plan.table_updates:
            self.extend_table(update)
        self.write_drafts(step.plan.rows)

    @property
    def num_slots(self) -> int:
        return len(self._admissions)

    def fill(self, admission: Admission) -> None:
        """Fill a slot with a new request."""
        self._admissions[admission.slot] = admission
        self.token_ids[admission.slot, : len(admission.token_ids)] = self.device.to_device(admission.token_ids)

    def extend_table(self, update: TableUpdate) -> None:
        ids = self.device.to_device(update.block_ids, torch.int32)
        self.block_tables[update.group, update.slot, update.first : update.first + len(update.block_ids)] = ids

    def write_drafts(self, rows: Sequence[Row]) -> None:
        """Put drafts at their positions. The tokens that are drawn overwrite them."""
        for row in rows:
            if row.draft_ids:
                first = row.start + 1
                drafts = self.device.to_device(row.draft_ids)
                self.token_ids[row.slot, first : first + len(row.draft_ids)] = drafts

    def params(self, slot: int) -> SamplingParams:
        return self._admitted(slot).params

    def num_prompt(self, slot: int) -> int:
        return self._admitted(slot).num_prompt

    def on_device(self, places: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """The slots and the positions of (slot, position), [N] int64 each, for `gather_ids` and `write_ids`."""
        slots = self.device.to_device([slot for slot, _ in places])
        return slots, self.device.to_device([position for _, position in places])

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
    """Inputs of a model's layers, for T tokens in R rows."""

    token_ids: Tensor
    """[T] int64."""
    attention: Sequence[AttentionBatch]
    """One for each cache group; they differ in their block tables only."""
    token_slots: Tensor
    """[T] int64: slot of each token, negative for padding."""
    state_rows: StateRows
    """The rows as layers with a recurrent state need them."""

    @classmethod
    def of_spans(
        cls,
        slots: Slots,
        spans: Sequence[Span],
        *,
        is_deterministic: bool,
        num_kept: Sequence[int] | None = None,
        num_ahead: int = 0,
    ) -> Batch:
        """Rows that the host knows. `num_kept`: number of each row's tokens without drafts; None if nothing is drafted.
        The ids are those of `num_ahead` positions further on."""
        device, rows = slots.device, [(start, count) for _, start, count in spans]
        row_slots = device.to_device([slot for slot, _, _ in spans])
        attention = [
            AttentionBatch.build(rows, table, slots.block_size, device.torch_device, is_deterministic=is_deterministic)
            for table in slots.block_tables.index_select(1, row_slots)
        ]
        positions, counts = attention[0].positions, device.to_device([count for _, count in rows])
        token_slots = row_slots.repeat_interleave(counts, output_size=positions.shape[0])
        token_ids = slots.gather_ids(token_slots, positions + num_ahead if num_ahead else positions)
        kept = None if num_kept is None else device.to_device(num_kept, torch.int32)
        return cls(token_ids, attention, token_slots, StateRows(attention[0].query_start, positions, row_slots, kept))

    @classmethod
    def of_decodes(
        cls,
        slots: Slots,
        rows: tuple[Tensor, Tensor, Tensor],
        padding_block: int,
        state_rows: StateRows | None = None,
        *,
        is_deterministic: bool,
    ) -> Batch:
        """Rows of one token that the device alone knows. rows: (slots [R] int64, negative for padding, positions [R]
        int64, first tokens [R + 1] int32). `state_rows`: as recurrent layers see them, if a slot has several rows."""
        (row_slots, positions, starts), size = rows, slots.block_size
        made = step_inputs(row_slots, positions, slots.token_ids, slots.block_tables, size, padding_block)
        attention = [
            AttentionBatch(
                query_start=starts,
                seq_lens=made.seq_lens,
                block_tables=tables,
                positions=positions,
                write_slots=write_slots,
                block_size=size,
                query_lens=(1,) * row_slots.shape[0],
                host_seq_lens=None,
                is_deterministic=is_deterministic,
            )
            for tables, write_slots in zip(made.block_tables, made.write_slots, strict=True)
        ]
        return cls(made.token_ids, attention, row_slots, state_rows or StateRows(starts, positions, row_slots))

    @classmethod
    def of_tokens(
        cls,
        slots: Slots,
        rows: tuple[Tensor, Tensor, Tensor],
        tokens: tuple[Tensor, Tensor],
        padding_block: int,
        *,
        is_deterministic: bool,
    ) -> Batch:
        """Rows of any tokens that the device alone knows. rows: (slots, KV lengths, ends among the tokens), [R] int64
        each. tokens: (slots, negative for padding, positions), [T] int64 each."""
        (row_slots, seq_lens, ends), (token_slots, positions), size = rows, tokens, slots.block_size
        sources, is_padding = token_slots.clamp(min=0), token_slots < 0
        starts, lens = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32), seq_lens.to(torch.int32)
        # However the tokens are shared out, rows have no more blocks of queries than these.
        counts = (positions.shape[0],) + (1,) * (row_slots.shape[0] - 1)
        attention = []
        for of_slots in slots.block_tables:
            tables = of_slots.index_select(0, row_slots)
            blocks = of_slots[sources, positions // size].to(torch.int64).masked_fill_(is_padding, padding_block)
            attention.append(
                AttentionBatch(
                    query_start=starts,
                    seq_lens=lens,
                    block_tables=tables,
                    positions=positions,
                    write_slots=blocks * size + positions % size,
                    block_size=size,
                    query_lens=counts,
                    host_seq_lens=None,
                    is_deterministic=is_deterministic,
                    knows_query_lens=False,
                )
            )
        return cls(
            slots.gather_ids(sources, positions), attention, token_slots, StateRows(starts, positions, row_slots)
        )
