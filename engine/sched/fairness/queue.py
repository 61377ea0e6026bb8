"""The queues of waiting entries: in order, with one queue per tenant, and of suspects. They do not know why an entry
waits.

Each question of a step costs O(log n), however many tenants wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from inferd.engine.request import Request
from inferd.engine.sched.entry import Entry, OrderKey, State
from inferd.engine.sched.fairness.fair import Shares
from inferd.engine.sched.fairness.heap import Key, LazyHeap


def _order_key(entry: Entry) -> OrderKey:
    return entry.order_key


def _start_by(entry: Entry) -> Key:
    return (entry.start_by_s,)


class WaitingQueue:
    """Waiting entries in order, and the tokens that they have to compute."""

    def __init__(self) -> None:
        self._entries: LazyHeap[Entry] = LazyHeap(_order_key)
        self.num_tokens = 0
        """Tokens that all entries have to compute."""
        self._by_priority: dict[int, int] = {}
        """The same by priority."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._entries

    def num_tokens_until(self, priority: int) -> int:
        """Tokens that entries of this priority or a better one have to compute."""
        return sum([count for level, count in self._by_priority.items() if level <= priority])

    def push(self, entry: Entry) -> None:
        self._entries.push(entry)
        self._count(entry, 1)

    def first(self) -> Entry | None:
        """The first entry, left in the queue."""
        return self._entries.first()

    def remove(self, entry: Entry) -> None:
        """Remove an entry, wherever it is."""
        self._entries.remove(entry)
        self._count(entry, -1)

    def entries(self) -> tuple[Entry, ...]:
        """All entries, in no order; for checks."""
        return tuple(self._entries)

    def _count(self, entry: Entry, sign: int) -> None:
        num_tokens, level = sign * entry.num_to_compute, entry.request.scheduling.priority
        self.num_tokens += num_tokens
        count = self._by_priority.pop(level, 0) + num_tokens
        if count:
            self._by_priority[level] = count


class FairQueue:
    """A `WaitingQueue` per tenant with waiting entries. Its first entry is the first of the tenant whose turn it is."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._queues: dict[str, WaitingQueue] = {}
        self._num_entries = 0
        self._timed: LazyHeap[Entry] = LazyHeap(_start_by)
        """Entries that must start by a certain time."""
        self.num_tokens = 0
        """Tokens that all entries have to compute."""

    def __len__(self) -> int:
        return self._num_entries

    @property
    def by_tenant(self) -> Mapping[str, WaitingQueue]:
        """The queues of tenants that wait. Do not push or remove while reading."""
        return self._queues

    def push(self, entry: Entry) -> None:
        tenant = entry.request.scheduling.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = WaitingQueue()
            self._shares.starts_waiting(tenant)
        queue.push(entry)
        self._num_entries += 1
        self.num_tokens += entry.num_to_compute
        if entry.start_by_s < inf:
            self._timed.push(entry)

    def first(self) -> Entry | None:
        """The first entry of the tenant whose turn it is, left in the queue."""
        tenant = self._shares.least()
        return None if tenant is None else self._queues[tenant].first()

    def remove(self, entry: Entry) -> None:
        """Remove an entry, wherever it is."""
        tenant = entry.request.scheduling.tenant
        queue = self._queues[tenant]
        queue.remove(entry)
        self._num_entries -= 1
        self.num_tokens -= entry.num_to_compute
        if entry in self._timed:
            self._timed.remove(entry)
        if not len(queue):
            del self._queues[tenant]
            self._shares.stops_waiting(tenant)

    def overdue(self, now: float) -> Entry | None:
        """An entry that had to start before `now`. It is returned again until it is removed or may start later."""
        entry = self._timed.first()
        return entry if entry is not None and entry.start_by_s < now else None

    def entries(self) -> tuple[Entry, ...]:
        """All entries, in no order; for checks."""
        return tuple([entry for queue in self._queues.values() for entry in queue.entries()])

    def check(self) -> None:
        """Raises `AssertionError`."""
        entries = self.entries()
        assert self._num_entries == len(entries), f"{len(entries)} wait, and {self._num_entries} are counted"
        assert self.num_tokens == sum(entry.num_to_compute for entry in entries)
        assert set(self._timed) == {entry for entry in entries if entry.start_by_s < inf}
        assert self._shares.waiting() == set(self._queues)


class SuspectQueue:
    """Requests that may have crashed the engine before this one: those that wait to run alone, and the one that does.

    Alone means that no other row is in flight, so that a crash names its cause. Suspects and all other requests take
    turns: one suspect, one step of the others. A suspect runs alone until it is cleared.
    """

    def __init__(self) -> None:
        self._waiting = WaitingQueue()
        self._current: Entry | None = None
        self._is_others_turn = True

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_due(self) -> bool:
        """Whether a suspect must start before the other requests get another step."""
        return bool(len(self._waiting)) and self._current is None and not self._is_others_turn

    def add(self, entry: Entry) -> None:
        entry.state = State.SUSPECT
        self._waiting.push(entry)

    def first(self) -> Entry:
        """The first suspect in order; it stays in the queue."""
        entry = self._waiting.first()
        assert entry is not None, "no suspect waits"
        return entry

    def begin(self) -> None:
        """Start the first suspect. From now on only it is given rows."""
        self._current = self.first()
        self._waiting.remove(self._current)

    def current(self) -> Entry | None:
        """The suspect that runs alone, or None.

        It is cleared once it has computed `num_to_clear` positions, or has ended, and all of it is applied: until then
        its last row may still crash the engine.
        """
        entry = self._current
        if entry is not None and entry.request.in_flight == 0 and _is_cleared(entry):
            self._end()
        return self._current

    def others_had_their_turn(self) -> None:
        self._is_others_turn = False

    def forget(self, entry: Entry) -> None:
        """Remove a suspect that ended while it waited."""
        if entry.state is State.SUSPECT:
            self._waiting.remove(entry)

    def check(self) -> None:
        """Raises `AssertionError`."""
        assert all(entry.state is State.SUSPECT for entry in self._waiting.entries())
        assert self._current is None or self._current.state in (State.RUNNING, State.FINISHED)

    def _end(self) -> None:
        self._current, self._is_others_turn = None, True


def _is_cleared(entry: Entry) -> bool:
    return entry.state is State.FINISHED or entry.request.computed >= num_to_clear(entry.request)


def num_to_clear(request: Request) -> int:
    """Positions that a suspect has to compute until it is cleared, at most those that it ever computes."""
    return min(request.scheduling.alone_until, request.num_needed)
