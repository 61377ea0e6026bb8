"""The memory of a recorded GPU, and pinned memory of the host: its tensors, and when memory is used again.

torch gives freed memory to the stream that was current when it was allocated, at once. It waits for copies of pinned
memory itself.
"""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from tests.cpu.recorded_gpu.order import Clock, Uses, Work, here


@dataclass(slots=True, eq=False)
class Memory:
    """One allocation."""

    address: int
    num_bytes: int
    is_pinned: bool
    label: str
    stream: int
    """The one that was current when it was allocated."""
    uses: Uses = field(default_factory=Uses)
    stale: str = ""
    """Why its content has no meaning; empty if it has one."""
    is_freed: bool = False
    is_of_graph: bool = False
    """Whether a capture allocated it."""


class Memories:
    """All allocations of the device, and all pinned ones."""

    def __init__(self) -> None:
        self._by_storage: dict[int, Memory] = {}
        self._by_address: list[tuple[int, int]] = []
        """(address, storage), ascending."""
        self._freed: deque[tuple[int, Memory]] = deque()
        self._reusable: dict[int, list[Memory]] = defaultdict(list)
        """Freed memory of the device by its stream."""
        self._lock = threading.RLock()

    def add(self, tensor: Tensor, stream: int, *, is_pinned: bool) -> Memory:
        """Note the new memory of a tensor."""
        storage = tensor.untyped_storage()
        label = f"{str(tensor.dtype)[6:]} {list(tensor.shape)} of {here()}"
        memory = Memory(storage.data_ptr(), storage.nbytes(), is_pinned, label, stream)
        with self._lock:
            self._forget_freed()
            self._by_storage[storage._cdata] = memory
            if memory.num_bytes:
                insort(self._by_address, (memory.address, storage._cdata))
        weakref.finalize(storage, self._free, storage._cdata, memory).atexit = False
        return memory

    def of(self, tensor: Tensor) -> Memory | None:
        """The memory of the device, or the pinned one; None for other memory of the host."""
        if tensor.is_mkldnn:
            return None
        memory = self._by_storage.get(tensor.untyped_storage()._cdata)
        return None if memory is None or memory.is_freed else memory

    def at(self, numbers: Iterable[int]) -> set[Memory]:
        """The memories that hold one of these addresses."""
        found = set()
        with self._lock:
            self._forget_freed()
            for number in numbers:
                place = bisect_right(self._by_address, (number, sys.maxsize)) - 1
                if place >= 0:
                    memory = self._by_storage[self._by_address[place][1]]
                    if memory.address <= number < memory.address + memory.num_bytes:
                        found.add(memory)
        return found

    def reuse(self, stream: int, clock: Clock) -> tuple[Memory, Work] | None:
        """Freed memory is used again by work that begins with `clock`. Returns one that may still be in use, with its
        work; None if there is none."""
        with self._lock:
            self._forget_freed()
            for memory in self._reusable.pop(stream, ()):
                work = memory.uses.unended(clock)
                if work is not None:
                    return memory, work
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that are in use."""
        with self._lock:
            self._forget_freed()
            return sum(memory.num_bytes for memory in self._by_storage.values() if not memory.is_pinned)

    def _free(self, storage: int, memory: Memory) -> None:
        """May run at any time, so it does little."""
        memory.is_freed = True
        self._freed.append((storage, memory))

    def _forget_freed(self) -> None:
        while self._freed:
            storage, memory = self._freed.popleft()
            if self._by_storage.get(storage) is memory:
                del self._by_storage[storage]
            place = bisect_right(self._by_address, (memory.address, storage)) - 1
            if place >= 0 and self._by_address[place] == (memory.address, storage):
                del self._by_address[place]
            # A graph keeps its own.
            if not memory.is_pinned and not memory.is_of_graph:
                self._reusable[memory.stream].append(memory)
