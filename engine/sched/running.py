"""The running requests in order of rank, and which of them is preempted.

The victim is always the last in rank, and never ranks before the requester. So the first in rank is never preempted: it
runs until it ends, and two requests cannot preempt each other for ever.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from inferd.engine.sched.entry import Entry, Rank


def _rank(entry: Entry) -> Rank:
    return entry.rank


class RunningSet:
    """Entries sorted by rank. A step moves only a few of them, so this is a list."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def add(self, entry: Entry) -> None:
        insort(self._entries, entry, key=_rank)

    def remove(self, entry: Entry) -> None:
        index = bisect_left(self._entries, entry.rank, key=_rank)
        assert self._entries[index] is entry, "removed and not running"
        del self._entries[index]

    def victim(self, requester: Entry) -> Entry | None:
        """The entry to preempt so that `requester` can go on, or None if no entry ranks behind it."""
        last = self._entries[-1]
        return last if last is not requester else None
