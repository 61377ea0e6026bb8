"""The rules of rows equal their meaning, computed number by number, and the state follows what rows draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.logit_rules import (
    BIASED,
    EMPTY,
    ENDS,
    FAILED,
    MARKED,
    PROMPT,
    SOUND,
    UNSOUND,
    WORDED,
    RuleState,
    apply_rules,
    record_drawn,
)

pytestmark = pytest.mark.usefixtures("implementation")

NAN, INF = float("nan"), float("inf")
SLOTS, WORDS, LENGTH = 8, 8, 4
FREE = torch.iinfo(torch.int64).max


def state_of(vocab_size: int) -> RuleState:
    """Slot s has the rules of kind s. What a kind does not use is NaN or out of range."""
    shape = (SLOTS, vocab_size)
    ends = (torch.rand(shape) < 0.1).to(torch.int32) * ENDS
    seen = (torch.rand(shape) < 0.2).to(torch.int32) * PROMPT
    state = RuleState(
        penalties=torch.rand(SLOTS, 3) + torch.tensor([0.5, -0.5, -0.5]),
        first_free=torch.arange(SLOTS) * 3,
        bias=torch.randn(shape).masked_fill_(torch.rand(shape) < 0.2, -INF),
        marks=torch.randint(-3, 4, shape).clamp_min_(0).to(torch.int32) | ends | seen,
        prefixes=torch.randint(-1, 3, (SLOTS, WORDS, LENGTH)).to(torch.int32),
        last_ids=torch.randint(-1, vocab_size, (SLOTS, WORDS)).to(torch.int32),
        tails=torch.randint(-1, 3, (SLOTS, LENGTH)).to(torch.int32),
    )
    for slot in range(SLOTS):
        if not slot & BIASED:
            state.bias[slot] = NAN
        if not slot & MARKED:
            state.marks[slot] = -(2**31) + 7
            state.penalties[slot] = NAN
        if not slot & WORDED:
            state.last_ids[slot] = 10**6
    return state


def kinds() -> Tensor:
    return torch.arange(SLOTS, dtype=torch.int32)


def meaning(row: Tensor, slot: int, position: int, state: RuleState) -> list[float]:
    """The row after its rules: one number at a time, each operation rounded to fp32."""
    if slot < 0:
        return [float(value) for value in row]
    values = [np.float32(value) for value in row.tolist()]
    repetition, presence, frequency = (np.float32(value) for value in state.penalties[slot].tolist())
    bias, marks = state.bias[slot].tolist(), state.marks[slot].tolist()
    for token_id, value in enumerate(values):
        changed = value
        if slot & BIASED:
            changed = changed + np.float32(bias[token_id])
        if slot & MARKED:
            count = marks[token_id] & PROMPT - 1
            if count or marks[token_id] & PROMPT:
                changed = changed / repetition if changed > 0 else changed * repetition
            changed = changed - np.float32(count) * frequency
            changed = changed - np.float32(count > 0) * presence
            if marks[token_id] < 0 and position < int(state.first_free[slot]):
                changed = np.float32(-INF)
        values[token_id] = changed
    if slot & WORDED:
        tail = [int(state.tails[slot, (position + i) % LENGTH]) for i in range(LENGTH)]
        for prefix, last_id in zip(state.prefixes[slot].tolist(), state.last_ids[slot].tolist(), strict=True):
            if last_id >= 0 and all(token in (-1, other) for token, other in zip(prefix, tail, strict=True)):
                values[last_id] = np.float32(-INF)
    return [float(value) for value in values]


def assert_equal(found: Tensor, expected: Sequence[Sequence[float]]) -> None:
    assert torch.equal(found.cpu(), torch.tensor(expected, device="cpu"))


@pytest.mark.parametrize("vocab_size", [1, 100, 2049, 4500])
@pytest.mark.parametrize("order", [[7], [3, 0, -1, 7, 5, 1, 6, 2, -1, 4]])
def test_every_row_by_the_rules_of_its_slot(vocab_size: int, order: list[int]) -> None:
    state, logits = state_of(vocab_size), torch.randn(len(order), vocab_size) * 3
    slots, positions = torch.tensor(order), torch.arange(len(order)) + 2
    expected = [meaning(logits[row], slot, row + 2, state) for row, slot in enumerate(order)]
    status = apply_rules(logits, slots, positions, kinds(), state)
    assert_equal(logits, expected)
    assert status.tolist() == [SOUND if slot > 0 else 0 for slot in order]


def test_each_kind_changes_something() -> None:
    """An oracle that agrees with doing nothing would prove nothing."""
    state, logits = state_of(300), torch.randn(SLOTS, 300)
    changed = logits.clone()
    state.prefixes[WORDED, 0], state.last_ids[WORDED, 0] = -1, 5
    apply_rules(changed, torch.arange(SLOTS), torch.zeros(SLOTS, dtype=torch.int64), kinds(), state)
    assert (changed != logits).any(dim=1).tolist() == [slot > 0 for slot in range(SLOTS)]


def test_the_last_tokens_are_found_by_their_positions() -> None:
    """The word 5 6 7 8 9 is due at each position behind 5 6 7 8, wherever the tail begins."""
    state = state_of(50)
    state.prefixes[WORDED], state.last_ids[WORDED] = -1, -1
    state.prefixes[WORDED, 3] = torch.tensor([5, 6, 7, 8])
    state.last_ids[WORDED, 3] = 9
    slots = torch.tensor([WORDED])
    nothing = torch.zeros(1, dtype=torch.bool), torch.ones(1, dtype=torch.int32)
    due = []
    for position, token_id in enumerate([1, 5, 6, 7, 8, 9, 5, 5, 6, 7, 8, 8, 5, 6, 7, 8]):
        record_drawn(torch.tensor([token_id]), *nothing, slots, torch.tensor([position]), kinds(), state)
        logits = torch.zeros(1, 50)
        apply_rules(logits, slots, torch.tensor([position + 1]), kinds(), state)
        due.append(bool(logits[0, 9] == -INF))
        assert int((logits == -INF).sum()) == due[-1]
    assert [position for position, is_due in enumerate(due) if is_due] == [4, 10, 15]


def test_what_a_row_was_before_its_rules() -> None:
    """The rules of slot 7 forbid every token, which hides no fault of the row."""
    state = state_of(2100)
    state.bias[7], state.penalties[7] = -INF, torch.tensor([1.0, 0.0, 0.0])
    logits = torch.randn(5, 2100)
    logits[1, 2099], logits[2, 0], logits[3] = NAN, INF, -INF
    for slot, expected in ((7, [SOUND, UNSOUND, UNSOUND, 0, SOUND]), (0, [0] * 5), (-1, [0] * 5)):
        for row in range(5):
            found = apply_rules(logits[row][None].clone(), torch.tensor([slot]), torch.tensor([9]), kinds(), state)
            assert found.tolist() == [expected[row]]


def test_outcomes() -> None:
    drawn, is_none = torch.arange(6) + 10, torch.tensor([False, True, True, False, True, False])
    status = torch.tensor([SOUND, SOUND, 0, UNSOUND, UNSOUND, 0], dtype=torch.int32)
    slots = torch.full((6,), -1)
    found = record_drawn(drawn, is_none, status, slots, drawn, kinds(), state_of(20))
    assert found.tolist() == [10, EMPTY, FAILED, FAILED, FAILED, 15]


@pytest.mark.parametrize("num_rows", [1, 8, 200])
def test_drawn_tokens_are_counted_where_rules_ask_for_it(num_rows: int) -> None:
    """Most rows are padding, which may not write to the slot of another row."""
    state = state_of(300)
    before = RuleState(*(tensor.clone() for tensor in state))
    slots = torch.full((num_rows,), -1)
    slots[torch.randperm(num_rows)[:SLOTS]] = torch.randperm(SLOTS)[:num_rows]
    drawn, positions = torch.randint(0, 300, (num_rows,)), torch.randint(0, 2**33, (num_rows,))
    nothing = torch.zeros(num_rows, dtype=torch.bool), torch.ones(num_rows, dtype=torch.int32)
    record_drawn(drawn, *nothing, slots, positions, kinds(), state)
    for slot, token_id, position in zip(slots.tolist(), drawn.tolist(), positions.tolist(), strict=True):
        if slot >= 0 and slot & MARKED:
            before.marks[slot, token_id] += 1
        if slot >= 0 and slot & WORDED:
            before.tails[slot, position % LENGTH] = token_id
    assert torch.equal(state.marks, before.marks) and torch.equal(state.tails, before.tails)
