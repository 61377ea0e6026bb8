"""Planted bugs of what outlives an engine. See `tests.sim.planting`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inferd.engine.cache import table as table_module
from inferd.engine.cache.below import Found, PrefixLoad
from inferd.engine.cache.group import PrefixMatch
from inferd.engine.cache.ledger import Entry, LeftContent
from inferd.engine.cache.pool import BlockPool
from inferd.engine.cache.prefix import GONE, ChainKeys, PrefixIndex
from inferd.engine.cache.state_checkpoints import SequenceCheckpoints
from inferd.engine.cache.table import BlockTable
from inferd.engine.core.rechecks import Course, Rechecks, Sample
from tests.sim.left_memory import LeftMemory
from tests.sim.planting import Patch, Plants

plant = Plants()


@plant
def damaged_content_is_taken(patch: Patch) -> None:
    """Corruption: the checksum is not compared."""
    patch.setattr(LeftMemory, "is_sound", lambda self, entry: True)


@plant
def overwritten_block_stays_written_down(patch: Patch) -> None:
    """Stale entry: a block got other content, and the next engine believes that it has the old."""
    clear = BlockPool.clear_content

    def forgetful(self: BlockPool, block_id: int) -> None:
        on_clear, self._on_clear = self._on_clear, None
        clear(self, block_id)
        self._on_clear = on_clear

    patch.setattr(BlockPool, "clear_content", forgetful)


@plant
def block_is_written_down_before_it_is_computed(patch: Patch) -> None:
    """Half-written block: an engine that ends before the step has run leaves an entry of a block without content."""
    admit = BlockTable.admit

    def early(self: BlockTable, match: PrefixMatch, num_tokens: int) -> bool:
        is_admitted, ledger = admit(self, match, num_tokens), self._cache.ledger
        if is_admitted and ledger is not None:
            for group in self._groups:
                for index in range(len(match.nodes), min(self.num_full, len(group.blocks))):
                    ledger.write(Entry(group.blocks[index], group.group, self.key(index), index, self._use))
        return is_admitted

    patch.setattr(BlockTable, "admit", early)


@plant
def salt_is_no_part_of_the_key(patch: Patch) -> None:
    """Isolation: a tenant's blocks are found by another after a crash."""
    patch.setattr(PrefixIndex, "root_key", lambda self, salt: self._hash(b"", b""))


@plant
def evicted_block_is_still_found(patch: Patch) -> None:
    """Stale entry: a block that an earlier engine left is given to a request, and found by its old key later."""

    def drop(self: LeftContent, place: int) -> None:
        entry = self._by_place.pop(place)
        self._clear(place)
        self._by_place[place] = entry

    patch.setattr(LeftContent, "drop", drop)


@plant
def window_is_written_down_as_another_group(patch: Patch) -> None:
    """Exchanged blocks: the entry of a window's block names the first group."""

    class OfFirstGroup:
        def __new__(cls, place: int, group: int, key: bytes, depth: int, use: int) -> Entry:  # type: ignore[misc]
            return Entry(place, 0, key, depth, use)

    patch.setattr(table_module, "Entry", OfFirstGroup)


@plant
def checkpoint_is_written_down_before_the_step(patch: Patch) -> None:
    """Half-written checkpoint: an engine that ends before the step has run leaves an entry of a state that it lacks."""
    leave = SequenceCheckpoints.leave

    def early(
        self: SequenceCheckpoints, position: int, num_tokens: int, keys: ChainKeys, take: Callable[[], int | None]
    ) -> int | None:
        checkpoint_id, states = leave(self, position, num_tokens, keys, take), self._states
        if checkpoint_id is not None and states.ledger is not None and position <= len(self._request.ids):
            depth, place = position // self._block_size - 1, states.first_place + checkpoint_id
            states.ledger.write(Entry(place, len(self._index._is_full), keys.key(depth), depth, 0))
        return checkpoint_id

    patch.setattr(SequenceCheckpoints, "leave", early)


@plant
def a_piece_that_was_loaded_in_part_is_used(patch: Patch) -> None:
    """Aborted load: blocks that a load has written only in part are found."""
    settle = PrefixLoad.settle
    patch.setattr(PrefixLoad, "settle", lambda self, is_loaded: settle(self, is_loaded=True))


@plant
def a_loaded_piece_is_indexed_without_a_gap_before_it(patch: Patch) -> None:
    """Wrong place: a piece is indexed behind the salt, though the pieces before it are gone."""
    patch.setattr(PrefixLoad, "_before", lambda self, depth: self._request.salt)


@plant
def loaded_blocks_are_exchanged(patch: Patch) -> None:
    """Exchanged blocks: the first block of a piece holds the second one's content."""
    reserve = PrefixLoad.reserve

    def swapped(self: PrefixLoad, found: Sequence[Found]) -> tuple[list[Found], list[list[int]]]:
        pieces, places = reserve(self, found)
        return pieces, [[rows[1], rows[0], *rows[2:]] if len(rows) > 3 else rows for rows in places]

    patch.setattr(PrefixLoad, "reserve", swapped)


@plant
def blocks_return_while_they_are_compared(patch: Patch) -> None:
    """Eviction under a comparison: a request writes to blocks that the tier still compares."""

    def give_way(self: Rechecks) -> None:
        if self._course is not None:
            self._cache.take_back([place for of_group in self._course.blocks for place in of_group if place != GONE])
            self._course.blocks, self._course.checkpoint = [], None

    patch.setattr(Rechecks, "give_way", give_way)


@plant
def recheck_begins_behind_what_it_needs(patch: Patch) -> None:
    """Wrong table: the row begins one block too late, so the first block of the prefix is never computed."""
    begin = Rechecks._begin

    def late(self: Rechecks, sample: Sample) -> Course | None:
        course = begin(self, sample)
        if course is not None:
            course.at += self._cache.block_size
        return course

    patch.setattr(Rechecks, "_begin", late)
