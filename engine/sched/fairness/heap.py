"""A heap of items whose keys may grow, with lazy removal. Knows nothing of its items."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

_MIN_STALE = 32
"""Number of stale items that is never worth a rebuild."""

T = TypeVar("T", bound=Hashable)
Key = tuple[float, ...]


class LazyHeap(Generic[T]):
    """O(log n) to push, O(1) amortized to remove. At most half of a long heap is stale. Equal keys keep the order of
    pushing.

    The key of an item may grow while it is in the heap, without notice: the key of the first item is read again, and
    the item is moved if it has grown. A key never shrinks.
    """

    def __init__(self, key: Callable[[T], Key]) -> None:
        self._key = key
        self._heap: list[tuple[Key, int, T]] = []
        self._nodes: dict[T, tuple[Key, int, T]] = {}
        """The valid node of each item; other nodes in the heap are stale."""
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, item: T) -> bool:
        return item in self._nodes

    def __iter__(self) -> Iterator[T]:
        """Items in the order of pushing; for checks."""
        return iter(self._nodes)

    def push(self, item: T) -> None:
        assert item not in self._nodes, "queued twice"
        node = self._nodes[item] = (self._key(item), self._num_pushed, item)
        self._num_pushed += 1
        heapq.heappush(self._heap, node)

    def first(self) -> T | None:
        """The item of least key, left in the heap; None if it is empty."""
        heap = self._heap
        while heap:
            key, number, item = node = heap[0]
            if self._nodes.get(item) is not node:
                heapq.heappop(heap)
                continue
            grown = self._key(item)
            if grown == key:
                return item
            assert grown > key, f"a key shrank from {key} to {grown}"
            node = self._nodes[item] = (grown, number, item)
            heapq.heapreplace(heap, node)
        return None

    def remove(self, item: T) -> None:
        """Remove an item, wherever it is."""
        node = self._nodes.pop(item)
        if self._heap[0] is node:
            heapq.heappop(self._heap)
        if len(self._heap) - len(self._nodes) > max(_MIN_STALE, len(self._nodes)):
            self._heap = list(self._nodes.values())
            heapq.heapify(self._heap)
