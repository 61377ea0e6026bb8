"""A decode step's inputs equal those of a loop over rows in Python, with padding and over several steps."""

from __future__ import annotations

import pytest
import torch

from inferd.kernels.ops.paged_attention import AttentionBatch
from inferd.kernels.ops.step_inputs import step_inputs, write_drawn

pytestmark = pytest.mark.usefixtures("implementation")

NUM_SLOTS, MAX_LEN, NUM_GROUPS, PADDING_BLOCK = 9, 70, 3, 777


class State:
    """Slots of requests with random ids, positions and block tables, and rows for some of them in random order."""

    def __init__(self, slots: list[int], block_size: int, max_len: int = MAX_LEN) -> None:
        self.block_size = block_size
        self.slots = torch.tensor(slots)
        self.token_ids = torch.randint(1, 2**40, (NUM_SLOTS, max_len + 1))
        self.tables = torch.randint(0, 2**20, (NUM_GROUPS, NUM_SLOTS, -(-max_len // block_size)), dtype=torch.int32)
        self.positions = torch.randint(0, max_len - 5, (len(slots),)) * (self.slots >= 0)

    def check(self) -> None:
        made = step_inputs(self.slots, self.positions, self.token_ids, self.tables, self.block_size, PADDING_BLOCK)
        for row, (slot, position) in enumerate(zip(self.slots.tolist(), self.positions.tolist(), strict=True)):
            entry, offset = divmod(position, self.block_size)
            assert int(made.seq_lens[row]) == position + 1
            assert int(made.token_ids[row]) == (0 if slot < 0 else int(self.token_ids[slot, position]))
            for group in range(NUM_GROUPS):
                table = [PADDING_BLOCK] if slot < 0 else self.tables[group, slot, : entry + 1].tolist()
                assert made.block_tables[group, row, : entry + 1].tolist() == table
                assert int(made.write_slots[group, row]) == table[entry] * self.block_size + offset


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("slots", [[4], [8, 0, 3, 5], [2, -1, 7, -1, -1]])
def test_each_row_reads_its_own_slot(slots: list[int], block_size: int) -> None:
    State(slots, block_size).check()


def test_tables_longer_than_a_program() -> None:
    state = State([3, 1, 8], 1, 2100)
    state.positions[:] = torch.tensor([1023, 1024, 2099])
    state.check()


def test_it_is_what_the_host_would_build() -> None:
    """They equal the tensors of `AttentionBatch.build` for the same rows."""
    state = State([8, 0, 3, 5], 16)
    made = step_inputs(state.slots, state.positions, state.token_ids, state.tables, 16, PADDING_BLOCK)
    for group in range(NUM_GROUPS):
        spans = [(position, 1) for position in state.positions.tolist()]
        batch = AttentionBatch.build(spans, state.tables[group, state.slots], 16, "cpu")
        assert torch.equal(made.write_slots[group], batch.write_slots)
        assert torch.equal(made.seq_lens, batch.seq_lens)
        assert made.write_slots.dtype == batch.write_slots.dtype and made.block_tables.dtype == torch.int32


@pytest.mark.parametrize("num_rows", [4, 130])
def test_steps_follow_each_other(num_rows: int) -> None:
    """A step reads the ids that the step before drew. Nothing else changes, even if a step is made twice. Padding
    writes nothing, not even to the row of its clamped slot."""
    state = State([7, -1, 0, 5], 16)
    state.positions[2] = 0
    if num_rows > 4:  # more than one program, with padding and a row in the second
        state.slots = torch.cat([state.slots, torch.full((num_rows - 5,), -1), torch.tensor([3])])
        state.positions = torch.cat([state.positions, torch.zeros(num_rows - 4, dtype=torch.int64)])
    expected_ids = state.token_ids.clone()
    for _ in range(3):
        drawn, before = torch.randint(0, 2**40, (num_rows,)), state.positions.clone()
        for _ in range(2):
            write_drawn(drawn, state.slots, state.positions, state.token_ids)
        assert torch.equal(state.positions, before)
        for row, slot in enumerate(state.slots.tolist()):
            if slot >= 0:
                expected_ids[slot, state.positions[row] + 1] = drawn[row]
        assert torch.equal(state.token_ids, expected_ids)
        state.positions += state.slots >= 0
        if num_rows == 4:
            state.check()
