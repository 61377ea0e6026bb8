"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops.logit_rules.state import RuleState


def apply_rules(logits: Tensor, slots: Tensor, positions: Tensor, kinds: Tensor, state: RuleState) -> Tensor:
    slots, positions = slots.contiguous(), positions.contiguous()
    status = torch.empty(slots.shape, dtype=torch.int32)
    native.function("inferd_logit_rules")(
        logits.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        kinds.data_ptr(),
        *(tensor.data_ptr() for tensor in state),
        status.data_ptr(),
        logits.shape[0],
        logits.shape[1],
        *state.prefixes.shape[1:],
        torch.get_num_threads(),
    )
    return status


def record_drawn(
    drawn: Tensor, is_none: Tensor, status: Tensor, slots: Tensor, positions: Tensor, kinds: Tensor, state: RuleState
) -> Tensor:
    drawn, slots, positions = drawn.contiguous(), slots.contiguous(), positions.contiguous()
    is_none, outcomes = is_none.contiguous(), torch.empty(drawn.shape, dtype=torch.int64)
    native.function("inferd_record_drawn")(
        drawn.data_ptr(),
        is_none.data_ptr(),
        status.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        kinds.data_ptr(),
        state.marks.data_ptr(),
        state.tails.data_ptr(),
        outcomes.data_ptr(),
        drawn.shape[0],
        state.marks.shape[1],
        state.tails.shape[1],
    )
    return outcomes
