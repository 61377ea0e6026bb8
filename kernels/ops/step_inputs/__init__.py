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
from inferd.kernels.registry import Deferred, Implementation, Op, always


class Key(NamedTuple):
    device_type: str


class StepInputs(NamedTuple):
    """The inputs of a decode step of R rows, on the device."""

    token_ids: Tensor
    """[R] int64: the id that each row computes; 0 for padding."""
    write_slots: Tensor
    """[G, R] int64, by cache group: block_id * block_size + offset of each token's K and V."""
    seq_lens: Tensor
    """[R] int32: KV length of each row, this step's token included."""
    block_tables: Tensor
    """[G, R, B] int32: the rows' tables. Entries behind a row's last block may be anything."""


def reference_step_inputs(
    slots: Tensor, positions: Tensor, token_ids: Tensor, block_tables: Tensor, block_size: int, padding_block: int
) -> StepInputs:
    is_padding, sources = slots < 0, slots.clamp(min=0)
    tables = block_tables.index_select(1, sources)
    tables[:, :, 0].masked_fill_(is_padding, padding_block)
    entries = (positions // block_size).expand(tables.shape[0], -1).unsqueeze(-1)
    blocks = tables.gather(2, entries).squeeze(-1).to(torch.int64)
    return StepInputs(
        token_ids=token_ids[sources, positions].masked_fill_(is_padding, 0),
        write_slots=blocks * block_size + positions % block_size,
        seq_lens=(positions + 1).to(torch.int32),
        block_tables=tables,
    )


def reference_write_drawn(drawn: Tensor, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
    places = slots.clamp(min=0), positions + 1
    # Add each id's change, which is 0 for padding: padding may add to the place of another row.
    token_ids.index_put_(places, (drawn - token_ids[places]).masked_fill_(slots < 0, 0), accumulate=True)


def cpp_step_inputs(
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


STEP_INPUTS: Op[Key, Callable[[Tensor, Tensor, Tensor, Tensor, int, int], StepInputs]] = Op(
    "step_inputs",
    [
        Implementation("cpp", cpp_step_inputs, lambda key: native.refuses(key.device_type)),
        Implementation(
            "triton", Deferred(f"{__name__}.triton", "step_inputs"), lambda key: gpu.refuses(key.device_type)
        ),
        Implementation("reference", reference_step_inputs, always),
    ],
)
WRITE_DRAWN: Op[Key, Callable[[Tensor, Tensor, Tensor, Tensor], None]] = Op(
    "write_drawn",
    [
        Implementation(
            "triton", Deferred(f"{__name__}.triton", "write_drawn"), lambda key: gpu.refuses(key.device_type)
        ),
        Implementation("reference", reference_write_drawn, always),
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
