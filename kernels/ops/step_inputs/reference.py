"""A decode step's inputs in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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


def step_inputs(
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


def write_drawn(drawn: Tensor, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
    places = slots.clamp(min=0), positions + 1
    # Add each id's change, which is 0 for padding: padding may add to the place of another row.
    token_ids.index_put_(places, (drawn - token_ids[places]).masked_fill_(slots < 0, 0), accumulate=True)
