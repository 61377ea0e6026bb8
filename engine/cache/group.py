"""The blocks of a block table by cache group, and the usable length of a prefix hit. Knows no pool and no requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from inferd.engine.arch.paging import max_blocks, num_dead_blocks
from inferd.engine.cache.prefix import GONE, Node


class Appended(NamedTuple):
    """Blocks added to a table: `block_ids[i]` is entry `first + i` of cache group `group`."""

    group: int
    first: int
    block_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class GroupBlocks:
    """Blocks of one group. Entry i of `blocks` holds the positions from i * block_size on. Entries before `first` are
    dead, and `GONE`."""

    group: int
    window: int | None
    blocks: list[int]
    first: int = 0
    num_sent: int = 0
    """Leading entries that the worker knows, or need not know."""

    @property
    def held(self) -> list[int]:
        return self.blocks[self.first :]

    def hit(self, nodes: Sequence[Node], block_size: int) -> list[int]:
        """Start behind a hit of `nodes`. Keeps the blocks that the next query sees, and returns them; the others are
        dead."""
        self.first = self.num_sent = num_dead_blocks(self.window, len(nodes) * block_size, block_size)
        self.blocks = [GONE] * self.first + [node.block_ids[self.group] for node in nodes[self.first :]]
        return self.held

    def most_entries(self, num_cached: int, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Entries with which a table can compute `num_tokens` positions behind `num_cached` to the end.

        A group without a window needs one for each block. Once a window's group holds the most blocks that the window
        can touch at once, those that die make up for new ones.
        """
        num_dead = num_dead_blocks(self.window, num_cached, block_size)
        return num_dead + max_blocks(self.window, num_tokens, step_tokens, block_size)

    def next_death(self, block_size: int) -> int:
        """Number of computed positions at which the first held block dies. Only for a group with a window."""
        assert self.window is not None
        return (self.first + 1) * block_size + self.window - 1

    def take_dead(self, num_computed: int, block_size: int) -> list[int]:
        """Give up and return the blocks that no query at `num_computed` or later sees."""
        first, end = self.first, num_dead_blocks(self.window, num_computed, block_size)
        if end <= first:
            return []
        dead = self.blocks[first:end]
        self.blocks[first:end] = [GONE] * (end - first)
        self.first = end
        return dead

    def take_appended(self) -> Appended:
        """Blocks appended since the last call."""
        first, self.num_sent = self.num_sent, len(self.blocks)
        return Appended(self.group, first, tuple(self.blocks[first:]))


class Groups(list[GroupBlocks]):
    """All groups of one table. A block that its group has no entry for is missing."""

    __slots__ = ("windowed",)

    def __init__(self, windows: Sequence[int | None]) -> None:
        super().__init__(GroupBlocks(group, window, []) for group, window in enumerate(windows))
        self.windowed = [group for group in self if group.window is not None]

    @property
    def num_whole(self) -> int:
        """Leading entries for which every group has a block or had one."""
        return min([len(group.blocks) for group in self])

    def num_missing(self, num_entries: int) -> int:
        """Blocks with which every group has so many entries."""
        num_missing = 0
        for group in self:
            missing = num_entries - len(group.blocks)
            if missing > 0:
                num_missing += missing
        return num_missing

    def extend_to(self, num_entries: int, taken: list[int]) -> None:
        """Give every group so many entries, by these blocks."""
        for group in self:
            while len(group.blocks) < num_entries:
                group.blocks.append(taken.pop())

    def num_dying(self, num_computed: int, block_size: int) -> int:
        """Held blocks that no query at `num_computed` or later sees."""
        return sum(max(0, num_dead_blocks(group.window, num_computed, block_size) - group.first) for group in self)

    def take_appended(self) -> list[Appended]:
        """Blocks appended since the last call, one entry per group that got any."""
        return [group.take_appended() for group in self if group.num_sent < len(group.blocks)]

    def held_from_the_last(self) -> Iterator[int]:
        """Held blocks, the last positions first."""
        first, end = min(group.first for group in self), max(len(group.blocks) for group in self)
        for i in range(end - 1, first - 1, -1):
            for group in self:
                if group.first <= i < len(group.blocks):
                    yield group.blocks[i]

    def check(self, num_computed: int, block_size: int) -> None:
        """Assert that every block that is seen is held, once, and no other."""
        held = [block_id for group in self for block_id in group.held]
        assert GONE not in held and len(set(held)) == len(held), "a block is twice in one table"
        for group in self:
            assert group.num_sent <= len(group.blocks)
            assert all(block_id == GONE for block_id in group.blocks[: group.first])
            num_dead = num_dead_blocks(group.window, num_computed, block_size)
            assert not held or group.first == num_dead, "a block that is seen was given back, or a dead one kept"


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix of a request's ids; valid until the cache changes."""

    nodes: tuple[Node, ...]
    num_tokens: int
    num_unheld: int
    """Blocks of the match that no request holds: to admit it takes them from the free blocks."""
    checkpoint_id: int = GONE
    """The state behind the match; `GONE` for a model without states, and if nothing matches."""
    num_known: int = 0
    """Tokens that others have computed, although their blocks cannot be used without a state behind them."""


def num_usable_states(nodes: Sequence[Node], windows: Sequence[int | None], block_size: int) -> int:
    """As `num_usable`, for a model with recurrent state: a checkpoint must stand at the end as well."""
    end = num_usable(nodes, windows, block_size)
    while end and nodes[end - 1].checkpoint_id == GONE:
        at = end - 1
        while at and nodes[at - 1].checkpoint_id == GONE:
            at -= 1
        end = num_usable(nodes[:at], windows, block_size)
    return end


def num_usable(nodes: Sequence[Node], windows: Sequence[int | None], block_size: int) -> int:
    """Length of the longest usable prefix of a chain: each window must hold all that the next query would see of it.

    Full groups hold every node's block. The search starts at the end. A gap that stops a hit of n blocks stops every
    hit that reaches beyond the gap, because their windows begin no later.
    """

    def first_seen(num_blocks: int) -> dict[int, int]:
        """First block that is seen behind a hit of `num_blocks`, by group with a window."""
        position = num_blocks * block_size
        return {g: num_dead_blocks(window, position, block_size) for g, window in enumerate(windows) if window}

    end = at = len(nodes)
    first = first_seen(end)
    while at > min(first.values(), default=at):
        at -= 1
        block_ids = nodes[at].block_ids
        if any(at >= first[group] and block_ids[group] == GONE for group in first):
            end = at
            first = first_seen(end)
    return end
