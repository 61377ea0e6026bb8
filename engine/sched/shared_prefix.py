"""Prompts that would compute the same blocks at the same time: one leads, the others follow.

A waiting request whose next block is being computed by a running one is set aside until that block, and all further
ones they share, are in the prefix index. It follows only who ranks before it: what holds the leader up would have held
up the follower as well, so nobody waits longer than it would have. When the leader ends or is preempted, they go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from inferd.engine.api.wire.params import SchedulingParams
from inferd.engine.cache.table import BlockTable
from inferd.engine.sched.entry import Entry, PrefixKey


class PrefixSharing:
    """Which running entry computes which block key, and who waits for it."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, Entry] = {}
        self._followers: dict[bytes, dict[Entry, None]] = {}

    @property
    def num_following(self) -> int:
        return sum(len(followers) for followers in self._followers.values())

    def lead(self, entry: Entry, keys: Iterator[bytes], num_cached: int, block_size: int) -> None:
        """`entry` will compute the blocks of these keys, in order, behind its first `num_cached` positions."""
        for i, key in enumerate(keys, start=1):
            if self._leaders.setdefault(key, entry) is entry:
                entry.leading[key] = num_cached + i * block_size

    def key_to_await(self, entry: Entry, keys: Iterator[bytes]) -> bytes | None:
        """The last of `keys`, the next blocks of `entry`, that the leader of the first will compute; or None."""
        awaited: bytes | None = None
        first_leader: Entry | None = None
        for key in keys:
            leader = self._leaders.get(key)
            if leader is None or leader.rank > entry.rank or leader is not (first_leader or leader):
                break
            awaited, first_leader = key, leader
        return awaited

    def follow(self, entry: Entry, key: bytes) -> None:
        entry.follows = key
        self._followers.setdefault(key, {})[entry] = None

    def unfollow(self, entry: Entry) -> None:
        """The follower ends while it waits."""
        followers = self._followers[entry.follows]
        del followers[entry]
        if not followers:
            del self._followers[entry.follows]

    def advance(self, entry: Entry, num_computed: int) -> list[Entry]:
        """The leader has computed and indexed so many positions; returns the followers that waited for it."""
        freed: list[Entry] = []
        for key, needed in list(entry.leading.items()):
            if needed > num_computed:
                break
            freed += self._end(entry, key)
        return freed

    def leave(self, entry: Entry) -> list[Entry]:
        """The leader goes away; returns all that waited for it."""
        return [follower for key in list(entry.leading) for follower in self._end(entry, key)]

    def _end(self, entry: Entry, key: bytes) -> list[Entry]:
        del entry.leading[key], self._leaders[key]
        return list(self._followers.pop(key, ()))

    def check(self) -> None:
        for key, leader in self._leaders.items():
            assert key in leader.leading
        for key, followers in self._followers.items():
            assert key in self._leaders, "followers of nobody"
            assert followers, "a list of no followers is kept"
            assert all(follower.follows == key for follower in followers)


class SharedPrefixGroups:
    """Live requests that have all full blocks of their prompts in common, as the choices of one request have."""

    def __init__(self) -> None:
        self._groups: dict[PrefixKey, dict[Entry, None]] = {}

    def of(self, prefix_key: PrefixKey | None) -> Collection[Entry]:
        """Those that live, in the order in which they came; the first of them computes what is shared."""
        return self._groups[prefix_key].keys() if prefix_key in self._groups else ()

    def add(self, entry: Entry) -> None:
        if entry.prefix_key is not None:
            self._groups.setdefault(entry.prefix_key, {})[entry] = None

    def remove(self, entry: Entry) -> None:
        """It is over."""
        if entry.prefix_key is not None:
            entries = self._groups[entry.prefix_key]
            del entries[entry]
            if not entries:
                del self._groups[entry.prefix_key]


def prefix_key_of(scheduling: SchedulingParams, table: BlockTable) -> PrefixKey | None:
    """Key of the prompt blocks that a group has in common.

    None if the request can share no block. None also if it has no target: nobody forecasts for it, and hashing a long
    prompt takes milliseconds.
    """
    num_blocks = table.num_hittable if scheduling.ttft_target_s is not None else 0
    return (scheduling.tenant, scheduling.priority, table.key(num_blocks - 1)) if num_blocks else None
