"""The waiting queue: entries by rank, a queue for each tenant, and nothing of why they wait."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from inferd.engine.sched.entry import Entry, Rank
from inferd.engine.sched.fair import Shares

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


class FairQueue:
    """A `WaitingQueue` for each tenant that has something in it: the first of all is the first of whose turn it is."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._queues: dict[str, WaitingQueue] = {}

    def __len__(self) -> int:
        return sum([len(queue) for queue in self._queues.values()])

    @property
    def tenants(self) -> Iterable[str]:
        """Those who wait; do not push or remove while reading."""
        return self._queues.keys()

    def of(self, tenant: str) -> WaitingQueue:
        """One tenant's; empty where it has none."""
        return self._queues.get(tenant) or WaitingQueue()

    def num_tokens(self) -> int:
        """That those in it have to compute."""
        return sum([queue.num_tokens() for queue in self._queues.values()])

    def push(self, entry: Entry) -> None:
        tenant = entry.request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = WaitingQueue()
        queue.push(entry)

    def first(self) -> Entry | None:
        """Of the tenant whose turn it is, the entry of least rank; left in the queue."""
        if not self._queues:
            return None
        tenants = self._queues
        return self._queues[next(iter(tenants)) if len(tenants) == 1 else self._shares.least(tenants)].first()

    def remove(self, entry: Entry) -> None:
        """Take an entry out, wherever it stands."""
        tenant = entry.request.tenant
        queue = self._queues[tenant]
        queue.remove(entry)
        if not len(queue):
            del self._queues[tenant]
            self._shares.stops_waiting(tenant)

    def heads(self) -> Iterator[Entry]:
        """The first of each tenant; one that is removed makes room for the next."""
        for tenant in tuple(self._queues):
            last = None
            while (head := self.of(tenant).first()) is not None and head is not last:
                yield head
                last = head

    def entries(self) -> tuple[Entry, ...]:
        """All of them, in no order: for checks."""
        return tuple([entry for queue in self._queues.values() for entry in queue.entries()])
