"""The inputs of a decode step of R rows, on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepInputs(NamedTuple):
    token_ids: Tensor
    """[R] int64: the id that each row computes; 0 for padding."""
    write_slots: Tensor
    """[G, R] int64, by cache group: block_id * block_size + offset of each token's K and V."""
    seq_lens: Tensor
    """[R] int32: KV length of each row, this step's token included."""
    block_tables: Tensor
    """[G, R, B] int32: the rows' tables. Entries behind a row's last block may be anything."""
