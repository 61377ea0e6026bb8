"""The rules in plain PyTorch, over rows of every kind: a row without a rule takes the changes of none."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.ops.logit_rules.state import (
    BIASED,
    EMPTY,
    FAILED,
    MARKED,
    PROMPT,
    SOUND,
    UNSOUND,
    WORDED,
    RuleState,
)

_NEVER = float("-inf")


def apply_rules(logits: Tensor, slots: Tensor, positions: Tensor, kinds: Tensor, state: RuleState) -> Tensor:
    held = slots.clamp_min(0)
    kind = kinds[held].masked_fill_(slots < 0, 0)[:, None]
    is_sound = (logits > _NEVER).any(dim=1).to(torch.int32) * SOUND
    status = is_sound.masked_fill_(~(logits < float("inf")).all(dim=1), UNSOUND).masked_fill_(kind[:, 0] == 0, 0)
    biased = torch.where(kind & BIASED != 0, logits + state.bias[held], logits)
    ruled = torch.where(kind & MARKED != 0, _penalised(biased, held, positions, state), biased)
    logits.copy_(_without_words(ruled, held, positions, kind & WORDED != 0, state))
    return status


def _penalised(logits: Tensor, slots: Tensor, positions: Tensor, state: RuleState) -> Tensor:
    repetition, presence, frequency = torch.split(state.penalties[slots], 1, dim=1)
    marks = state.marks[slots]
    counts = (marks & PROMPT - 1).to(torch.float32)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = torch.where(marks & 2 * PROMPT - 1 != 0, repeated, logits)
    changed.sub_(counts * frequency).sub_((counts > 0).to(torch.float32) * presence)
    is_too_early = (positions < state.first_free[slots])[:, None]
    return changed.masked_fill_((marks < 0) & is_too_early, _NEVER)


def _without_words(logits: Tensor, slots: Tensor, positions: Tensor, is_worded: Tensor, state: RuleState) -> Tensor:
    prefixes, last_ids, vocab_size = state.prefixes[slots], state.last_ids[slots].to(torch.int64), logits.shape[1]
    length = state.tails.shape[1]
    places = (positions[:, None] + torch.arange(length, device=logits.device)) % length
    tails = state.tails[slots].gather(1, places)[:, None]
    is_due = ((prefixes == tails) | (prefixes == -1)).all(dim=2) & (last_ids >= 0) & is_worded
    # Words that are not due forbid a column behind the vocabulary.
    is_forbidden = torch.zeros((len(logits), vocab_size + 1), dtype=torch.bool, device=logits.device)
    is_forbidden.scatter_(1, torch.where(is_due, last_ids, vocab_size), value=True)
    return logits.masked_fill(is_forbidden[:, :vocab_size], _NEVER)


def record_drawn(
    drawn: Tensor, is_none: Tensor, status: Tensor, slots: Tensor, positions: Tensor, kinds: Tensor, state: RuleState
) -> Tensor:
    held = slots.clamp_min(0)
    kind = kinds[held].masked_fill_(slots < 0, 0)
    # Rows without such a rule add 0: padding may add to the place of another row.
    state.marks.index_put_((held, drawn), (kind & MARKED != 0).to(torch.int32), accumulate=True)
    places = held, positions % state.tails.shape[1]
    change = (drawn.to(torch.int32) - state.tails[places]).masked_fill_(kind & WORDED == 0, 0)
    state.tails.index_put_(places, change, accumulate=True)
    without_id = torch.where(status == SOUND, EMPTY, FAILED)
    return torch.where(is_none | (status == UNSOUND), without_id, drawn)
