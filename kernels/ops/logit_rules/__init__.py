"""Rules that change rows of logits before the temperature, from state that is kept on the device by slot: what a
request asks for, and which tokens it has. One call applies the rules of all rows, another records their drawn tokens.

A rule that forbids a token sets its logit to -inf, which no later rule raises. So forbidden tokens are a bias of -inf.
Every operation is rounded separately, none is fused: a row's bits are the same in every implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.logit_rules import cpu, reference
from inferd.kernels.ops.logit_rules.state import (
    BIASED,
    EMPTY,
    ENDS,
    FAILED,
    MARKED,
    MAX_PREFIX,
    MAX_WORDS,
    PROMPT,
    SOUND,
    UNSOUND,
    WORDED,
    RuleState,
)
from inferd.kernels.registry import Deferred, Implementation, Op, always

__all__ = [
    "BIASED", "EMPTY", "ENDS", "FAILED", "MARKED", "MAX_PREFIX", "MAX_WORDS", "PROMPT", "SOUND", "UNSOUND", "WORDED",
    "RuleState", "apply_rules", "record_drawn",
]  # fmt: skip


class Key(NamedTuple):
    device_type: str
    vocab_size: int


APPLY: Op[Key, Callable[[Tensor, Tensor, Tensor, Tensor, RuleState], Tensor]] = Op(
    "logit_rules",
    [
        Implementation("cpp", cpu.apply_rules, lambda key: native.refuses(key.device_type, torch.float32)),
        Implementation(
            "triton", Deferred(f"{__name__}.triton", "apply_rules"), lambda key: gpu.refuses(key.device_type)
        ),
        Implementation("reference", reference.apply_rules, always),
    ],
)
RECORD: Op[Key, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, RuleState], Tensor]] = Op(
    "record_drawn",
    [
        Implementation("cpp", cpu.record_drawn, lambda key: native.refuses(key.device_type, torch.float32)),
        Implementation(
            "triton", Deferred(f"{__name__}.triton", "record_drawn"), lambda key: gpu.refuses(key.device_type)
        ),
        Implementation("reference", reference.record_drawn, always),
    ],
)


def apply_rules(logits: Tensor, slots: Tensor, positions: Tensor, kinds: Tensor, state: RuleState) -> Tensor:
    """Change each row by the rules of its slot, in place. Returns what the rows were before: [R] int32.

    `SOUND`: the row held a number above -inf, and neither NaN nor +inf. `UNSOUND`: it held NaN or +inf. 0: it held
    nothing above -inf, or it has no rules, and no such row is read.

    logits [R, V] fp32, rows contiguous; slots [R] int64, negative for padding rows; positions [R] int64 of the tokens
    to draw; kinds [S] int32: the rules of each slot, a sum of `BIASED`, `MARKED` and `WORDED`. No two rows that are not
    padding have one slot.
    """
    assert logits.dtype == torch.float32 and logits.is_contiguous() and logits.shape[1] == state.bias.shape[1]
    _check(slots, positions, kinds, state)
    assert slots.shape == positions.shape == logits.shape[:1]
    return APPLY.resolve(Key(logits.device.type, logits.shape[1]))(logits, slots, positions, kinds, state)


def record_drawn(
    drawn: Tensor, is_none: Tensor, status: Tensor, slots: Tensor, positions: Tensor, kinds: Tensor, state: RuleState
) -> Tensor:
    """Record the tokens that rows drew, if their slots' rules ask for it. Returns outcomes [R] int64: the id, `FAILED`
    or `EMPTY`.

    drawn [R] int64, below V; is_none [R] bool: the row had no token above -inf, or held NaN or +inf; status [R] as
    `apply_rules` gave it; the rest as there.
    """
    _check(slots, positions, kinds, state)
    assert drawn.shape == slots.shape == positions.shape == is_none.shape == status.shape
    assert drawn.dtype == torch.int64 and is_none.dtype == torch.bool and status.dtype == torch.int32
    run = RECORD.resolve(Key(drawn.device.type, state.bias.shape[1]))
    return run(drawn, is_none, status, slots, positions, kinds, state)


def _check(slots: Tensor, positions: Tensor, kinds: Tensor, state: RuleState) -> None:
    assert slots.dtype == positions.dtype == state.first_free.dtype == torch.int64
    assert kinds.dtype == state.marks.dtype == state.prefixes.dtype == state.tails.dtype == torch.int32
    assert state.penalties.dtype == state.bias.dtype == torch.float32 and state.marks.shape == state.bias.shape
    assert kinds.is_contiguous() and all(tensor.is_contiguous() for tensor in state)
