"""Sequences for tests of kernels with a recurrent state: whole, or cut into steps, in slots of a pool full of NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from inferd.kernels.ops.states import StateRows

Step = Callable[[Tensor, StateRows], Tensor]
"""Computes a step: (indices [T] of its tokens among all, its rows) -> [T, ...]."""

LENS = (1, 9, 4, 30)
SLOTS = (5, 0, 3, 2)
NUM_SLOTS = 7
CUTS = ((1, 1, 1, 1), (0, 7, 2, 3), (0, 0, 0, 21), (0, 1, 1, 5))
"""Tokens of each sequence in each step. A step has a row for each sequence with tokens."""


def rows_of(spans: Sequence[tuple[int, int, int]], num_drafts: int = 0) -> StateRows:
    """Rows of (slot, first position, number of tokens), of which the last `num_drafts` leave no state. A row without
    tokens follows."""
    ends = [0, *accumulate(count for _, _, count in spans)]
    positions = [position for _, first, count in spans for position in range(first, first + count)]
    slots, kept = [slot for slot, _, _ in spans], [count - num_drafts for _, _, count in spans]
    num_kept = torch.tensor([*kept, 1], dtype=torch.int32) if num_drafts else None
    return StateRows(
        torch.tensor([*ends, ends[-1]], dtype=torch.int32), torch.tensor(positions), torch.tensor([*slots, 0]), num_kept
    )


def whole(step: Step) -> Tensor:
    """All sequences in one step."""
    spans = [(slot, 0, count) for slot, count in zip(SLOTS, LENS, strict=True)]
    return step(torch.arange(sum(LENS)), rows_of(spans))


def in_steps(step: Step, result: Tensor, num_drafts: int = 0) -> Tensor:
    """All sequences in steps, which are written to a copy of `result`. Each row ends with drafts that are rejected:
    tokens of other places. Each step also has a row of padding, and some have a row without tokens."""
    result = torch.full_like(result, float("nan"))
    firsts = [0, *accumulate(LENS)]
    done = [0] * len(LENS)
    for counts in CUTS:
        spans, tokens = [], []
        for place, count in enumerate(counts):
            if count:
                spans.append((SLOTS[place], done[place], count + num_drafts))
                first = firsts[place] + done[place]
                tokens += [*range(first, first + count), *range(num_drafts)]
                done[place] += count
        own = len(spans)
        spans += [*[(SLOTS[0], 0, 0)] * (max(counts) > 1), (-1, 0, 1)]
        found = step(torch.tensor([*tokens, 0]), rows_of(spans, num_drafts)).split([count for _, _, count in spans])
        for (slot, position, count), computed in zip(spans[:own], found, strict=False):
            first = firsts[SLOTS.index(slot)] + position
            result[first : first + count - num_drafts] = computed[: count - num_drafts]
    assert tuple(done) == LENS
    return result


def alone(step: Step, place: int) -> Tensor:
    """One of the sequences in one step."""
    first = sum(LENS[:place])
    return step(torch.arange(first, first + LENS[place]), rows_of([(SLOTS[place], 0, LENS[place])]))
