"""The Triton implementation: one launch before a decode step and one behind it.

Only the block table entries of a row's tokens are copied: 4 bytes read and written for each block in use. The tables'
width alone decides the grid.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferd.kernels.gpu import Shipped
from inferd.kernels.ops.step_inputs import StepInputs

_BLOCK, _NUM_WARPS = 1024, 4
_ROWS = 128
"""Rows of one program of `_write_drawn`."""


@triton.jit
def _step_inputs(
    slots,
    positions,
    token_ids,
    block_tables,
    out_ids,
    out_write_slots,
    out_seq_lens,
    out_tables,
    ids_stride,
    group_stride,
    slot_stride,
    width,
    padding_block,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs are (row, group, piece of the table). The first piece also writes everything that is not table."""
    row, group, piece = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_rows = tl.num_programs(0)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    is_padding = slot < 0
    source = block_tables + group * group_stride + slot * slot_stride
    goal = group * num_rows + row
    last = position // PAGE
    if piece * BLOCK <= last:
        entry = piece * BLOCK + tl.arange(0, BLOCK)
        is_used = entry <= last
        blocks = tl.load(source + entry, mask=is_used & (slot >= 0), other=0)
        tl.store(out_tables + goal * width + entry, tl.where(is_padding, padding_block, blocks), mask=is_used)
    if piece == 0:
        block = tl.load(source + last, mask=slot >= 0, other=0)
        block = tl.where(is_padding, padding_block, block).to(tl.int64)
        tl.store(out_write_slots + goal, block * PAGE + position % PAGE)
        if group == 0:
            tl.store(out_ids + row, tl.load(token_ids + slot * ids_stride + position, mask=slot >= 0, other=0))
            tl.store(out_seq_lens + row, (position + 1).to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"])
def _write_drawn(drawn, slots, positions, token_ids, ids_stride, num_rows, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    is_row = slot >= 0
    position = tl.load(positions + row, mask=is_row, other=0) + 1
    tl.store(token_ids + slot * ids_stride + position, tl.load(drawn + row, mask=is_row, other=0), mask=is_row)


def step_inputs(
    slots: Tensor, positions: Tensor, token_ids: Tensor, block_tables: Tensor, block_size: int, padding_block: int
) -> StepInputs:
    assert slots.is_contiguous() and positions.is_contiguous()
    assert token_ids.stride(1) == block_tables.stride(2) == 1
    num_groups, num_rows, width = block_tables.shape[0], slots.shape[0], block_tables.shape[2]
    device = slots.device
    made = StepInputs(
        token_ids=torch.empty(num_rows, dtype=torch.int64, device=device),
        write_slots=torch.empty((num_groups, num_rows), dtype=torch.int64, device=device),
        seq_lens=torch.empty(num_rows, dtype=torch.int32, device=device),
        block_tables=torch.empty((num_groups, num_rows, width), dtype=torch.int32, device=device),
    )
    _step_inputs[(num_rows, num_groups, triton.cdiv(width, _BLOCK))](
        slots,
        positions,
        token_ids,
        block_tables,
        *made,
        token_ids.stride(0),
        block_tables.stride(0),
        block_tables.stride(1),
        width,
        padding_block,
        PAGE=block_size,
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return made


def write_drawn(drawn: Tensor, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
    assert drawn.is_contiguous() and slots.is_contiguous() and positions.is_contiguous() and token_ids.stride(1) == 1
    num_rows = slots.shape[0]
    _write_drawn[(triton.cdiv(num_rows, _ROWS),)](
        drawn, slots, positions, token_ids, token_ids.stride(0), num_rows, ROWS=_ROWS, num_warps=_ROWS // 32
    )


def shipped() -> Iterator[Shipped]:
    for block_size in (16, 32, 64, 128):
        yield Shipped(
            op="step_inputs",
            config=f"blocks of {block_size}",
            kernel=_step_inputs,
            signature={
                **dict.fromkeys(("slots", "positions", "token_ids", "out_ids", "out_write_slots"), "*i64"),
                **dict.fromkeys(("block_tables", "out_seq_lens", "out_tables"), "*i32"),
                **dict.fromkeys(("ids_stride", "group_stride", "slot_stride", "width", "padding_block"), "i32"),
            },
            constants={"PAGE": block_size, "BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
        )
    yield Shipped(
        op="write_drawn",
        config=f"{_ROWS} rows",
        kernel=_write_drawn,
        signature={
            **dict.fromkeys(("drawn", "slots", "positions", "token_ids"), "*i64"),
            **dict.fromkeys(("ids_stride", "num_rows"), "i32"),
        },
        constants={"ROWS": _ROWS},
        num_warps=_ROWS // 32,
    )
