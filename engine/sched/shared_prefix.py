"""Requests that would compute the same blocks at the same time: one leads, the others wait.

If a running request is computing the next block of a waiting one, the waiting one is set aside. It waits until that
block, and all further blocks that they share, are in the prefix index. A request waits only for a leader that ranks
before it. A delay of the leader would have delayed the waiter as well, so waiting never makes it later. When the
leader ends or is preempted, its waiters go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from inferd.engine.api.wire.params import SchedulingParams
from inferd.engine.cache.table import BlockTable
from inferd.engine.sched.entry import Entry, PrefixKey


class PrefixSharing:
    """The leader of each block key that is being computed, and its waiters."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, Entry] = {}
        self._waiters: dict[bytes, dict[Entry, None]] = {}

    @property
    def num_waiting(self) -> int:
        return sum(len(waiters) for waiters in self._waiters.values())

    def lead(self, entry: Entry, keys: Iterator[bytes], num_cached: int, block_size: int) -> None:
        """Record that `entry` computes the blocks of these keys, in order, behind its first `num_cached` positions."""
        for i, key in enumerate(keys, start=1):
            if self._leaders.setdefault(key, entry) is entry:
                entry.leading[key] = num_cached + i * block_size

    def key_to_await(self, entry: Entry, keys: Iterator[bytes]) -> bytes | None:
        """The last of `keys` that the leader of the first will compute, or None. `keys` are those of the next blocks of
        `entry`."""
        awaited: bytes | None = None
        first_leader: Entry | None = None
        for key in keys:
            leader = self._leaders.get(key)
            if leader is None or leader.order_key > entry.order_key or leader is not (first_leader or leader):
                break
            awaited, first_leader = key, leader
        return awaited

    def wait(self, entry: Entry, key: bytes) -> None:
        entry.awaited_key = key
        self._waiters.setdefault(key, {})[entry] = None

    def want_checkpoint(self, key: bytes) -> None:
        """Let the leader of this block leave a checkpoint behind it, if the model has recurrent states."""
        leader = self._leaders[key]
        leader.table.want_checkpoint(leader.leading[key])

    def stop_waiting(self, entry: Entry) -> None:
        """Remove a waiter that ends while it waits."""
        waiters = self._waiters[entry.awaited_key]
        del waiters[entry]
        if not waiters:
            del self._waiters[entry.awaited_key]

    def advance(self, entry: Entry, num_computed: int) -> list[Entry]:
        """Returns the waiters whose blocks are done: the leader has computed and indexed `num_computed` positions."""
        freed: list[Entry] = []
        for key, needed in list(entry.leading.items()):
            if needed > num_computed:
                break
            freed += self._end(entry, key)
        return freed

    def leave(self, entry: Entry) -> list[Entry]:
        """Remove a leader; returns all its waiters."""
        return [waiter for key in list(entry.leading) for waiter in self._end(entry, key)]

    def _end(self, entry: Entry, key: bytes) -> list[Entry]:
        del entry.leading[key], self._leaders[key]
        return list(self._waiters.pop(key, ()))

    def check(self) -> None:
        for key, leader in self._leaders.items():
            assert key in leader.leading
        for key, waiters in self._waiters.items():
            assert key in self._leaders, "waiters without a leader"
            assert waiters, "an empty list of waiters is kept"
            assert all(waiter.awaited_key == key for waiter in waiters)


class Branches:
    """The ends of what live prompts share, for a model with recurrent states: the first to come leaves a checkpoint
    there. It may compute these blocks before the scheduler looks at the others. If it is too late for that, the next
    one does."""

    def __init__(self) -> None:
        self._first: dict[bytes, Entry] = {}
        """Block key -> the first live entry with this block in its prompt."""
        self._num_blocks: dict[Entry, int] = {}
        """Blocks of each live entry's prompt that others could share."""

    def add(self, entry: Entry, block_size: int) -> None:
        num_blocks = self._num_blocks[entry] = entry.table.num_hittable
        shared: tuple[Entry, int] | None = None
        for number, key in enumerate(entry.table.keys(0, num_blocks), start=1):
            first = self._first.setdefault(key, entry)
            if first is not entry:
                shared = first, number
        if shared is not None:
            first, num_shared = shared
            if not first.table.want_checkpoint(num_shared * block_size):
                entry.table.want_checkpoint(num_shared * block_size)

    def remove(self, entry: Entry) -> None:
        for key in entry.table.keys(0, self._num_blocks.pop(entry)):
            if self._first.get(key) is entry:
                del self._first[key]

    def check(self, entries: Collection[Entry]) -> None:
        assert all(entry in entries for entry in self._first.values()), "a branch of a request that has ended"


class SharedPrefixGroups:
    """Live requests whose prompts have all full blocks in common, such as the choices of one request."""

    def __init__(self) -> None:
        self._groups: dict[PrefixKey, dict[Entry, None]] = {}

    def of(self, prefix_key: PrefixKey | None) -> Collection[Entry]:
        """Live members in order of arrival. The first computes the shared blocks."""
        return self._groups[prefix_key].keys() if prefix_key in self._groups else ()

    def add(self, entry: Entry) -> None:
        if entry.prefix_key is not None:
            self._groups.setdefault(entry.prefix_key, {})[entry] = None

    def remove(self, entry: Entry) -> None:
        if entry.prefix_key is not None:
            entries = self._groups[entry.prefix_key]
            del entries[entry]
            if not entries:
                del self._groups[entry.prefix_key]


def prefix_key_of(scheduling: SchedulingParams, table: BlockTable) -> PrefixKey | None:
    """Key of the prompt blocks that a group has in common.

    None if the request can share no block. Also None if it has no target: its first token is not forecast, and hashing
    a long prompt takes milliseconds.
    """
    num_blocks = table.num_hittable if scheduling.ttft_target_s is not None else 0
    return (scheduling.tenant, scheduling.priority, table.key(num_blocks - 1)) if num_blocks else None
