"""Rows whose columns lie in several processes of one machine, put together or added up.

The processes are ranks. All of them call in the same order, with equally many rows. Ranks on CPUs exchange through
memory that all have mapped: by a C++ kernel, so a recorded step can hold it (`tape.py`). Ranks on GPUs exchange through
a process group of torch (`group.py`).
"""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
from torch import Tensor

from inferd.kernels.cpu import native

BUFFER_BYTES = 2**20
"""Size of one of a rank's two buffers. Larger parts pass in pieces."""
MAX_RANKS = 128
_HEADER_BYTES = MAX_RANKS * 128
"""Two cache lines for each rank's state."""


def exchange_bytes(num_ranks: int) -> int:
    """Size of the memory that `num_ranks` ranks share, which must hold zeros at first."""
    assert num_ranks <= MAX_RANKS
    return _HEADER_BYTES + 2 * BUFFER_BYTES * num_ranks


class Exchange(Protocol):
    """One rank's end of an exchange."""

    def gather(self, part: Tensor, size: int, *, wants: bool = True) -> Tensor:
        """part [T, own columns] -> [T, size]. Rank r has ceil(size / ranks) columns from r times that many on, and the
        last rank those that are left. Unless this rank `wants` the result, its content is undefined."""
        ...

    def add(self, part: Tensor) -> Tensor:
        """The sum of all ranks' [T, N], on every rank. `part` may be overwritten."""
        ...

    def broadcast(self, values: Tensor) -> Tensor:
        """values [N] of rank 0, on every rank. Other ranks give a tensor of that shape, which is not read."""
        ...


class MemoryExchange:
    """Through shared memory. Needs the C++ kernels."""

    def __init__(self, descriptor: int, rank: int, num_ranks: int) -> None:
        """`descriptor` is open on `exchange_bytes` of memory; the caller closes it."""
        self._rank, self._num_ranks = rank, num_ranks
        self._memory = torch.frombuffer(mmap.mmap(descriptor, exchange_bytes(num_ranks)), dtype=torch.uint8)
        self._gather = native.function("inferd_gather")

    def gather(self, part: Tensor, size: int, *, wants: bool = True) -> Tensor:
        return self._exchange(part, size, -(-size // self._num_ranks), wants=wants)

    def add(self, part: Tensor) -> Tensor:
        raise NotImplementedError("ranks on CPUs keep the bits of one process, so they add up nothing")

    def broadcast(self, values: Tensor) -> Tensor:
        return self._exchange(values[None], values.shape[0], values.shape[0])[0]

    def _exchange(self, part: Tensor, size: int, width: int, *, wants: bool = True) -> Tensor:
        part = part if part.stride(1) == 1 else part.contiguous()
        item = part.element_size()
        out = torch.empty((part.shape[0], size), dtype=part.dtype)
        self._gather(
            self._memory.data_ptr(),
            BUFFER_BYTES,
            self._rank,
            self._num_ranks,
            part.data_ptr(),
            part.stride(0) * item,
            out.data_ptr(),
            part.shape[0],
            size * item,
            width * item,
            wants,
        )
        return out
