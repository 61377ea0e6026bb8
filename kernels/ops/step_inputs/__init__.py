"""The inputs of a decode step, made on the device from the results of the step before: gather, model, draw, scatter.
The host can launch the step before it has seen the drawn ids, and a CUDA graph can hold it.

Row r of the step is the request in slot slots[r]; it computes the token at positions[r]. A negative slot is padding,
for a graph with more rows than there are requests: a sequence of one token in a block that no request has. Neither
function changes its inputs, so a step may be made twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.step_inputs import cpu, reference
from inferd.kernels.ops.step_inputs.reference import StepInputs
from inferd.kernels.registry import Deferred, Implementation, Op, always

__all__ = ["StepInputs", "step_inputs", "write_drawn"]


class Key(NamedTuple):
    device_type: str


STEP_INPUTS: Op[Key, Callable[[Tensor, Tensor, Tensor, Tensor, int, int], StepInputs]] = Op(
    "step_inputs",
    [
        Implementation("cpp", cpu.step_inputs, lambda key: native.refuses(key.device_type)),
        Implementation(
            "triton", Deferred(f"{__name__}.triton", "step_inputs"), lambda key: gpu.refuses(key.device_type)
        ),
        Implementation("reference", reference.step_inputs, always),
    ],
)
WRITE_DRAWN: Op[Key, Callable[[Tensor, Tensor, Tensor, Tensor], None]] = Op(
    "write_drawn",
    [
        Implementation(
            "triton", Deferred(f"{__name__}.triton", "write_drawn"), lambda key: gpu.refuses(key.device_type)
        ),
        Implementation("reference", reference.write_drawn, always),
    ],
)


def step_inputs(
    slots: Tensor, positions: Tensor, token_ids: Tensor, block_tables: Tensor, block_size: int, padding_block: int
) -> StepInputs:
    """The inputs of a step in which each of R rows has one token.

    slots, positions [R] int64, the position of padding 0; token_ids [S, L] int64, the id at each position of each slot;
    block_tables [G, S, B] int32, entry i the block of positions i * block_size .. (i + 1) * block_size; `padding_block`
    receives the K and V of padding.
    """
    assert slots.shape == positions.shape and slots.dtype == positions.dtype == token_ids.dtype == torch.int64
    assert block_tables.dtype == torch.int32 and block_tables.shape[1] == token_ids.shape[0]
    run = STEP_INPUTS.resolve(Key(slots.device.type))
    return run(slots, positions, token_ids, block_tables, block_size, padding_block)


def write_drawn(drawn: Tensor, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
    """Write each row's drawn id behind its token. Padding's ids are dropped.

    drawn, slots, positions [R] int64, positions below L - 1; token_ids [S, L] int64. No two rows that are not padding
    have one slot.
    """
    assert drawn.shape == slots.shape == positions.shape
    assert drawn.dtype == slots.dtype == positions.dtype == token_ids.dtype == torch.int64
    WRITE_DRAWN.resolve(Key(slots.device.type))(drawn, slots, positions, token_ids)
