"""The Triton implementation: a program for each 2048 tokens of a row, then a program a row for its words. Programs of
rows without a rule end at once.

The floor is memory: a token's logit is read and written, with 4 bytes of bias and 4 of marks if the slot has them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import Shipped
from inferd.kernels.ops.logit_rules import state as definition
from inferd.kernels.ops.logit_rules.state import MAX_PREFIX, MAX_WORDS, RuleState

_BLOCK, _NUM_WARPS, _ROWS = 2048, 4, 128
_UNFUSED = {"enable_fp_fusion": False}
_BIASED, _MARKED = tl.constexpr(definition.BIASED), tl.constexpr(definition.MARKED)
_WORDED, _PROMPT = tl.constexpr(definition.WORDED), tl.constexpr(definition.PROMPT)
_SOUND, _UNSOUND = tl.constexpr(definition.SOUND), tl.constexpr(definition.UNSOUND)
_FAILED, _EMPTY = tl.constexpr(definition.FAILED), tl.constexpr(definition.EMPTY)


@triton.jit
def _kind_of(kinds, slot):
    return tl.load(kinds + slot, mask=slot >= 0, other=0)


@triton.jit
def _apply(logits, slots, positions, kinds, penalties, first_free, bias, marks, status, size, BLOCK: tl.constexpr):
    row, token_ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    kind = _kind_of(kinds, slot)
    if kind != 0:
        is_inside = token_ids < size
        place = row * size + token_ids
        values = tl.load(logits + place, mask=is_inside, other=float("-inf"))
        is_fault = (values != values) | (values == float("inf"))
        found = tl.where(is_fault, _UNSOUND, tl.where(values > float("-inf"), _SOUND, 0))
        tl.atomic_max(status + row, tl.max(found, 0))
        of_slot = slot * size + token_ids
        if (kind & _BIASED) != 0:
            values += tl.load(bias + of_slot, mask=is_inside, other=0.0)
        if (kind & _MARKED) != 0:
            mark = tl.load(marks + of_slot, mask=is_inside, other=0)
            repetition = tl.load(penalties + 3 * slot)
            presence, frequency = tl.load(penalties + 3 * slot + 1), tl.load(penalties + 3 * slot + 2)
            count = mark & (_PROMPT - 1)
            divided = tl.div_rn(values, tl.zeros_like(values) + repetition)
            repeated = tl.where(values > 0, divided, values * repetition)
            values = tl.where((mark & (2 * _PROMPT - 1)) != 0, repeated, values)
            values -= count.to(tl.float32) * frequency
            values -= tl.where(count > 0, 1.0, 0.0) * presence
            is_too_early = tl.load(positions + row) < tl.load(first_free + slot)
            values = tl.where((mark < 0) & is_too_early, float("-inf"), values)
        tl.store(logits + place, values, mask=is_inside)


@triton.jit
def _forbid_words(
    logits, slots, positions, kinds, prefixes, last_ids, tails, size, WORDS: tl.constexpr, LENGTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (_kind_of(kinds, slot) & _WORDED) != 0:
        word, token = tl.arange(0, WORDS), tl.arange(0, LENGTH)
        tail = tl.load(tails + slot * LENGTH + (tl.load(positions + row) + token) % LENGTH)
        prefix = tl.load(prefixes + (slot * WORDS + word)[:, None] * LENGTH + token[None, :])
        is_other = (prefix != tail[None, :]) & (prefix != -1)
        last_id = tl.load(last_ids + slot * WORDS + word)
        is_due = (tl.sum(is_other.to(tl.int32), 1) == 0) & (last_id >= 0)
        tl.store(logits + row * size + last_id, tl.full([WORDS], float("-inf"), tl.float32), mask=is_due)


@triton.jit(do_not_specialize=["num_rows"])
def _record(
    drawn, is_none, status, slots, positions, kinds, marks, tails, outcomes, size, num_rows,
    ROWS: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    slot = tl.load(slots + row, mask=is_row, other=-1)
    kind = tl.load(kinds + slot, mask=slot >= 0, other=0)
    token_id, position = tl.load(drawn + row, mask=is_row, other=0), tl.load(positions + row, mask=is_row, other=0)
    place, is_marked = slot * size + token_id, (kind & _MARKED) != 0
    tl.store(marks + place, tl.load(marks + place, mask=is_marked, other=0) + 1, mask=is_marked)
    tl.store(tails + slot * LENGTH + position % LENGTH, token_id.to(tl.int32), mask=(kind & _WORDED) != 0)
    before = tl.load(status + row, mask=is_row, other=0)
    has_none = (tl.load(is_none + row, mask=is_row, other=0) != 0) | (before == _UNSOUND)
    outcome = tl.where(has_none, tl.where(before == _SOUND, _EMPTY, _FAILED).to(tl.int64), token_id)
    tl.store(outcomes + row, outcome, mask=is_row)


def apply_rules(logits: Tensor, slots: Tensor, positions: Tensor, kinds: Tensor, state: RuleState) -> Tensor:
    slots, positions = slots.contiguous(), positions.contiguous()
    num_rows, size = logits.shape
    status = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    _apply[(num_rows, triton.cdiv(size, _BLOCK))](
        logits, slots, positions, kinds, *state[:4], status, size, BLOCK=_BLOCK, num_warps=_NUM_WARPS, **_UNFUSED
    )
    words, length = state.prefixes.shape[1:]
    _forbid_words[(num_rows,)](
        logits, slots, positions, kinds, *state[4:], size, WORDS=words, LENGTH=length, num_warps=_NUM_WARPS
    )
    return status


def record_drawn(
    drawn: Tensor, is_none: Tensor, status: Tensor, slots: Tensor, positions: Tensor, kinds: Tensor, state: RuleState
) -> Tensor:
    drawn, is_none, slots, positions = (tensor.contiguous() for tensor in (drawn, is_none, slots, positions))
    num_rows, size, length = len(drawn), state.marks.shape[1], state.tails.shape[1]
    outcomes = torch.empty(num_rows, dtype=torch.int64, device=drawn.device)
    _record[(triton.cdiv(num_rows, _ROWS),)](
        drawn, is_none, status, slots, positions, kinds, state.marks, state.tails, outcomes, size, num_rows,
        ROWS=_ROWS, LENGTH=length, num_warps=_ROWS // 32,
    )  # fmt: skip
    return outcomes


def shipped() -> Iterator[Shipped]:
    rows = {"slots": "*i64", "positions": "*i64", "kinds": "*i32"}
    yield Shipped(
        op="logit_rules",
        config="fp32",
        kernel=_apply,
        signature={
            "logits": "*fp32", **rows, "penalties": "*fp32", "first_free": "*i64", "bias": "*fp32", "marks": "*i32",
            "status": "*i32", "size": "i32",
        },
        constants={"BLOCK": _BLOCK},
        num_warps=_NUM_WARPS,
        is_streaming=True,
        multiples=("size",),
        options=_UNFUSED,
    )  # fmt: skip
    yield Shipped(
        op="logit_rules_words",
        config=f"{MAX_WORDS} words",
        kernel=_forbid_words,
        signature={
            "logits": "*fp32", **rows, **dict.fromkeys(("prefixes", "last_ids", "tails"), "*i32"), "size": "i32",
        },
        constants={"WORDS": MAX_WORDS, "LENGTH": MAX_PREFIX},
        num_warps=_NUM_WARPS,
        multiples=("size",),
    )  # fmt: skip
    yield Shipped(
        op="record_drawn",
        config=f"{_ROWS} rows",
        kernel=_record,
        signature={
            "drawn": "*i64", "is_none": "*u1", "status": "*i32", **rows, "marks": "*i32", "tails": "*i32",
            "outcomes": "*i64", "size": "i32", "num_rows": "i32",
        },
        constants={"ROWS": _ROWS, "LENGTH": MAX_PREFIX},
        num_warps=_ROWS // 32,
        multiples=("size",),
    )  # fmt: skip
