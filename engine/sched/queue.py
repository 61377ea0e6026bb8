"""The waiting queue: entries by rank, and nothing of why they wait."""

from __future__ import annotations

import heapq

from inferd.engine.sched.entry import Entry, Rank

_MIN_STALE = 32
"""Stale items that are never worth a rebuild."""

_Item = tuple[Rank, int, Entry]


class WaitingQueue:
    """A heap with lazy deletion: O(log n) to push, O(1) amortized to remove; at most half of a long heap is stale."""

    def __init__(self) -> None:
        self._heap: list[_Item] = []
        self._items: dict[Entry, _Item] = {}
        self._num_pushed = 0
        self._num_tokens: dict[int, int] = {}
        """That those in it have to compute, by priority."""

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._items

    def num_tokens(self, priority: int | None = None) -> int:
        """That those in it have to compute; with `priority`, of that one and of better ones."""
        return sum([count for level, count in self._num_tokens.items() if priority is None or level <= priority])

    def _count(self, entry: Entry, sign: int) -> None:
        level = entry.request.priority
        count = self._num_tokens.pop(level, 0) + sign * entry.num_to_compute
        if count:
            self._num_tokens[level] = count

    def push(self, entry: Entry) -> None:
        assert entry not in self._items, "queued twice"
        self._count(entry, 1)
        item = (entry.rank, self._num_pushed, entry)
        self._num_pushed += 1
        self._items[entry] = item
        heapq.heappush(self._heap, item)

    def first(self) -> Entry | None:
        """The entry of least rank, left in the queue."""
        while self._heap:
            item = self._heap[0]
            if self._items.get(item[2]) is item:
                return item[2]
            heapq.heappop(self._heap)
        return None

    def remove(self, entry: Entry) -> None:
        """Take an entry out, wherever it stands."""
        item = self._items.pop(entry)
        self._count(entry, -1)
        if self._heap[0] is item:
            heapq.heappop(self._heap)
        elif len(self._heap) - len(self._items) > max(_MIN_STALE, len(self._items)):
            self._heap = list(self._items.values())
            heapq.heapify(self._heap)

    def entries(self) -> tuple[Entry, ...]:
        """All of them, in no order: for checks."""
        return tuple(self._items)
