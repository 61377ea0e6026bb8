"""The ledger of blocks with content, which outlives this engine.

A place is a block, or behind all blocks a checkpoint. The cache writes an entry once a place's content is complete and
the index finds it, and erases it before the place gets other content. So the places that an engine's entries name hold
what the entries say, however the engine ends. The next engine finds them by key, and checks each before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from inferd.engine.cache.pool import BlockPool
from inferd.engine.cache.prefix import GONE, Node, PrefixIndex


class Entry(NamedTuple):
    """The content of one place."""

    place: int
    group: int
    """Cache group of the block; for a checkpoint the number of groups."""
    key: bytes
    """Chain key of the content: a strong hash of the salt and of all ids up to its end."""
    depth: int
    """Blocks before it in its chain."""
    use: int
    """Number of the admission that used it last. Later ones have larger numbers."""


class Ledger(Protocol):
    """A list of entries that outlives its engine."""

    def entries(self) -> Iterable[Entry]:
        """Those that an earlier engine left, in any order. Their content may be damaged."""
        ...

    def is_sound(self, entry: Entry) -> bool:
        """Whether the place still holds exactly what was written down."""
        ...

    def write(self, entry: Entry) -> None:
        """The place holds this from now on."""
        ...

    def touch(self, place: int, use: int) -> None:
        """A later admission uses a place that has an entry."""
        ...

    def erase(self, place: int) -> None:
        """The place is about to hold something else. It may have no entry."""
        ...


class LeftContent:
    """The content that an earlier engine left, in one cache. The blocks count as cached in the pool, and the index does
    not know them before a request asks for their content. Trusts keys alone, so the hash must be strong."""

    def __init__(self, ledger: Ledger, index: PrefixIndex, is_full: list[bool], pools: list[BlockPool]) -> None:
        """`is_full`: by cache group, whether its layers see all positions. `pools`: of blocks, and of checkpoints if
        there are any; the places of the second follow those of the first."""
        self._ledger, self._index, self._is_full, self._pools = ledger, index, is_full, pools
        num_places = sum(pool.num_blocks for pool in pools)
        found = (entry for entry in ledger.entries() if entry.place < num_places)
        # A chain is evicted from its end.
        entries = sorted(found, key=lambda entry: (entry.use, -entry.depth))
        self.last_use = entries[-1].use if entries else 0
        """The largest number of an admission so far."""
        self._by_place = {entry.place: entry for entry in entries}
        self._by_key: dict[bytes, dict[int, Entry]] = {}
        for entry in entries:
            self._by_key.setdefault(entry.key, {})[entry.group] = entry
        first = 0
        for pool in pools:
            pool.adopt([place - first for place in self._by_place if first <= place < first + pool.num_blocks])
            first += pool.num_blocks
        self.num_taken = 0
        """Places whose content the index has taken over."""
        self.num_damaged = 0
        """Places that did not hold what was written down."""

    def __bool__(self) -> bool:
        return bool(self._by_place)

    def __contains__(self, place: int) -> bool:
        return place in self._by_place

    def checkpoints(self) -> frozenset[int]:
        """Checkpoints among the places."""
        first = self._pools[0].num_blocks
        return frozenset(place - first for place in self._by_place if place >= first)

    def recall(self, parent: Node | str, key: bytes, ids: tuple[int, ...]) -> Node | None:
        """Let the index take over all places with this content, if they are sound. None if there is nothing that it can
        use."""
        entries = self._by_key.pop(key, {})
        for entry in entries.values():
            del self._by_place[entry.place]
        sound = {group: entry.place for group, entry in entries.items() if self._ledger.is_sound(entry)}
        self.num_damaged += len(entries) - len(sound)
        blocks = [sound.get(group, GONE) for group in range(len(self._is_full))]
        is_whole = all(block_id != GONE for block_id, is_full in zip(blocks, self._is_full, strict=True) if is_full)
        node = None
        if is_whole and any(block_id != GONE for block_id in blocks):
            node = self._index.insert(parent, key, ids, blocks)
        checkpoint = sound.get(len(self._is_full))
        if node is not None and checkpoint is not None:
            self._index.add_checkpoint(node, checkpoint - self._pools[0].num_blocks)
        for entry in entries.values():
            if self._is_indexed(entry.place):
                self.num_taken += 1
            else:
                self._clear(entry.place)
        return node

    def drop(self, place: int) -> None:
        """Give up one place, because it is needed for something else."""
        entry = self._by_place.pop(place)
        of_key = self._by_key.get(entry.key, {})
        if of_key.get(entry.group) is entry:
            del of_key[entry.group]
        self._clear(place)

    def _is_indexed(self, place: int) -> bool:
        num_blocks = self._pools[0].num_blocks
        return self._index.holds(place) if place < num_blocks else self._index.holds_checkpoint(place - num_blocks)

    def _clear(self, place: int) -> None:
        num_blocks = self._pools[0].num_blocks
        if place < num_blocks:
            self._pools[0].clear_content(place)
        else:
            self._pools[1].clear_content(place - num_blocks)
