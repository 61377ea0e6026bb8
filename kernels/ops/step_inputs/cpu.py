"""Calls the C++ implementation (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.kernels.cpu import native
from inferd.kernels.ops.step_inputs.reference import StepInputs


def step_inputs(
    slots: Tensor, positions: Tensor, token_ids: Tensor, block_tables: Tensor, block_size: int, padding_block: int
) -> StepInputs:
    assert slots.is_contiguous() and positions.is_contiguous()
    assert token_ids.stride(1) == block_tables.stride(2) == 1
    num_groups, num_rows, width = block_tables.shape[0], slots.shape[0], block_tables.shape[2]
    made = StepInputs(
        token_ids=torch.empty(num_rows, dtype=torch.int64),
        write_slots=torch.empty((num_groups, num_rows), dtype=torch.int64),
        seq_lens=torch.empty(num_rows, dtype=torch.int32),
        block_tables=torch.empty((num_groups, num_rows, width), dtype=torch.int32),
    )
    native.function("inferd_step_inputs")(
        slots.data_ptr(),
        positions.data_ptr(),
        token_ids.data_ptr(),
        block_tables.data_ptr(),
        *(tensor.data_ptr() for tensor in made),
        num_rows,
        num_groups,
        width,
        token_ids.stride(0),
        block_tables.stride(0),
        block_tables.stride(1),
        block_size,
        padding_block,
    )
    return made
