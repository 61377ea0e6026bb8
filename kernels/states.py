"""The rows of a step whose layers keep a recurrent state, for the kernels that advance it.

Each row continues the state at its slot of a pool, and leaves there the state behind its last token. A row that begins
at position 0 begins with zeros, whatever the slot holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.kernels import native


@dataclass(frozen=True, slots=True)
class StateRows:
    """R rows of T tokens in all."""

    query_start: Tensor
    """[R + 1] int32: row r has the tokens query_start[r] .. query_start[r + 1]."""
    positions: Tensor
    """[T] int64: position of each token in its sequence."""
    slots: Tensor
    """[R] int64: place of each row's state in the pool. No two are alike."""

    def __post_init__(self) -> None:
        assert self.query_start.dtype == torch.int32 and self.positions.dtype == self.slots.dtype == torch.int64
        assert self.query_start.shape[0] == self.slots.shape[0] + 1

    def spans(self) -> list[tuple[slice, int, bool]]:
        """(tokens, slot, whether the row begins a sequence) of each row, on the host."""
        ends = self.query_start.tolist()
        return [
            (slice(first, end), slot, int(self.positions[first]) == 0)
            for first, end, slot in zip(ends, ends[1:], self.slots.tolist(), strict=False)
            if first < end
        ]


def copy_state(pool: Tensor, source: int, goal: int) -> None:
    """pool[:, goal] = pool[:, source], for a contiguous pool [layers, places, ...].

    On 2 busy cores torch took 12 ms for the 19 MB of a state of Qwen3.5-0.8B, and 0.8 ms on idle ones (Zen 4,
    2026-11-26).
    """
    assert pool.is_contiguous()
    if not pool.numel():
        return  # torch gives an empty pool strides, and no memory
    if native.refuses(pool.device.type, pool.dtype) is not None:
        pool[:, goal].copy_(pool[:, source])
        return
    layer_bytes, num_bytes = (stride * pool.element_size() for stride in pool.stride()[:2])
    copy = native.function("inferd_copy_state")
    copy(pool.data_ptr(), len(pool), layer_bytes, num_bytes, source, goal, torch.get_num_threads())
