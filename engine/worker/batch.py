"""One step's input tensors, all built from the plan's rows in the plan's order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from inferd.engine.sched.plan import StepPlan
from inferd.engine.worker.device import Device
from inferd.engine.worker.slots import Slots
from inferd.kernels.paged_attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of T tokens in R rows."""

    token_ids: Tensor
    """[T] int64."""
    attention: tuple[AttentionBatch, ...]
    """One for each cache group; they differ in their block tables only."""
    first_tokens: tuple[int, ...]
    """[R] index of each row's first token within T."""

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
        first_tokens, num_tokens = [], 0
        for length in lens:
            first_tokens.append(num_tokens)
            num_tokens += length
        return cls(slots.gather_ids(token_slots, attention[0].positions), attention, tuple(first_tokens))
