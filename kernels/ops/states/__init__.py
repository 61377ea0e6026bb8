"""The rows of a step whose layers keep a recurrent state, for the kernels that advance it.

Each row continues the state at its slot of a pool, and leaves there the state behind its last token, or behind an
earlier one. A row that begins at position 0 begins with zeros, whatever the slot holds.

Gated DeltaNet and Mamba-2 have a matrix for each head as their state. What their kernels require is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.cpu import native

_MAX_KEY_DIM = 256
"""The kernels hold columns of a state on the stack, or in registers."""
_VALUE_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class StateRows:
    """R rows of T tokens in all."""

    query_start: Tensor
    """[R + 1] int32: row r has the tokens query_start[r] .. query_start[r + 1]."""
    positions: Tensor
    """[T] int64: position of each token in its sequence."""
    slots: Tensor
    """[R] int64: place of each row's state in the pool. No two rows with tokens have the same. A row of padding has -1,
    changes no state, and has no result."""
    num_kept: Tensor | None = None
    """[R] int32: number of tokens of each row, at least 1, behind which it leaves its state; None for all. Only on
    CPUs."""

    def __post_init__(self) -> None:
        assert self.query_start.is_contiguous() and self.positions.is_contiguous() and self.slots.is_contiguous()
        assert self.query_start.dtype == torch.int32 and self.positions.dtype == self.slots.dtype == torch.int64
        assert self.query_start.shape[0] == self.slots.shape[0] + 1

    @property
    def kept_address(self) -> int:
        """Address of `num_kept` for a C++ kernel."""
        return 0 if self.num_kept is None else self.num_kept.data_ptr()

    def spans(self) -> list[tuple[slice, int, bool, int]]:
        """(tokens, slot, whether the row begins a sequence, number of tokens before the state that it leaves) of each
        row that is computed, on the host."""
        ends, slots = self.query_start.tolist(), self.slots.tolist()
        kept = [len(self.positions)] * len(slots) if self.num_kept is None else self.num_kept.tolist()
        return [
            (slice(first, end), slot, int(self.positions[first]) == 0, min(num_kept, end - first))
            for first, end, slot, num_kept in zip(ends, ends[1:], slots, kept, strict=False)
            if first < end and slot >= 0
        ]


class Key(NamedTuple):
    """Decides which kernel advances states [key_dim, value_dim] of heads."""

    device_type: str
    dtype: torch.dtype
    key_dim: int
    value_dim: int


def refuses_cpp(key: Key) -> str | None:
    if key.key_dim % 2 or key.key_dim > _MAX_KEY_DIM:
        return f"takes states of at most {_MAX_KEY_DIM} rows, an even number, not {key.key_dim}"
    if key.value_dim % _VALUE_MULTIPLE:
        return f"takes states whose columns are a multiple of {_VALUE_MULTIPLE}, not {key.value_dim}"
    return native.refuses(key.device_type, key.dtype)


def refuses_triton(key: Key) -> str | None:
    if key.key_dim > _MAX_KEY_DIM:
        return f"takes states of at most {_MAX_KEY_DIM} rows, not {key.key_dim}"
    return gpu.refuses(key.device_type, key.dtype)


def num_groups(width: int, state: Tensor) -> int:
    """Number of groups of heads, each of which shares two vectors [K]. `width`: numbers of a token, which has a vector
    [V] for each head beside them. state [slots, H, K, V] fp32, contiguous."""
    num_slots, num_heads, key_dim, value_dim = state.shape
    found, rest = divmod(width - num_heads * value_dim, 2 * key_dim)
    assert not rest and found and num_heads % found == 0
    assert state.dtype == torch.float32 and state.is_contiguous() and num_slots
    return found


def copy_state(pool: Tensor, source: int, goal: int) -> None:
    """pool[:, goal] = pool[:, source], for a contiguous pool [layers, places, ...].

    On 2 busy cores torch took 12 ms for the 19 MB of a state of Qwen3.5-0.8B, and 0.8 ms on idle ones (Zen 4,
    2026-11-26).
    """
    assert pool.is_contiguous() and max(source, goal) < pool.shape[1]
    if not pool.numel():
        return  # torch gives an empty pool strides, and no memory
    if native.refuses(pool.device.type, pool.dtype) is not None:
        pool[:, goal].copy_(pool[:, source])
        return
    layer_bytes, num_bytes = (stride * pool.element_size() for stride in pool.stride()[:2])
    copy = native.function("inferd_copy_state")
    copy(pool.data_ptr(), len(pool), layer_bytes, num_bytes, source, goal, torch.get_num_threads())


def keep_rows(source: Tensor, kept: Tensor, indices: Tensor, num_rows: Tensor) -> None:
    """kept[i] = source[indices[i]] for all i below n.

    source and kept are contiguous matrices with rows of equal size; indices [at least n] and num_rows [1], which holds
    n, are int64. So a recorded step may keep other rows each time.
    """
    assert source.is_contiguous() and kept.is_contiguous() and source.dtype == kept.dtype
    assert source.shape[1] == kept.shape[1] and indices.dtype == num_rows.dtype == torch.int64
    if native.refuses(source.device.type, source.dtype) is not None:
        count = int(num_rows)
        kept[:count] = source[indices[:count]]
        return
    row_bytes = source.shape[1] * source.element_size()
    keep = native.function("inferd_keep_rows")
    keep(source.data_ptr(), kept.data_ptr(), row_bytes, indices.data_ptr(), num_rows.data_ptr())
