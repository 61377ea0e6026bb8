"""Planted bugs that only a cache with windows can have. See `tests.sim.planting`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inferd.engine.arch.paging import num_dead_blocks
from inferd.engine.cache import group as group_module
from inferd.engine.cache import table as table_module
from inferd.engine.cache.group import Appended, GroupBlocks
from inferd.engine.cache.pool import BlockPool
from inferd.engine.cache.prefix import GONE, Node, PrefixIndex
from inferd.engine.cache.table import BlockTable, KVCache
from inferd.engine.sched.entry import Entry
from inferd.engine.sched.step_planner import PlanBuilder
from tests.sim.planting import Patch, Plants

plant = Plants()


def _believe_everything(patch: Patch) -> None:
    """Switch off the cache's own checks, so that only the device's reads can reveal the bug."""
    for books in (BlockTable, PrefixIndex, KVCache):
        patch.setattr(books, "check", lambda self: None)


def _one_early(window: int | None, position: int, block_size: int) -> int:
    return num_dead_blocks(window, position + 1, block_size)


@plant
def window_is_one_too_short(patch: Patch) -> None:
    """Early free: a block is freed while the next query still sees its last position."""
    patch.setattr(group_module, "num_dead_blocks", _one_early)
    patch.setattr(table_module, "num_dead_blocks", _one_early)
    _believe_everything(patch)


@plant
def window_blocks_freed_when_launched(patch: Patch) -> None:
    """Early free: a launched step that has not been applied still reads the freed blocks."""
    add = PlanBuilder.add

    def eager(self: PlanBuilder, entry: Entry, num_tokens: int) -> None:
        add(self, entry, num_tokens)
        for group in entry.table._groups:
            for block_id in group.take_dead(entry.request.scheduled, entry.table._cache.block_size):
                entry.table._cache.pool.release(block_id)

    patch.setattr(PlanBuilder, "add", eager)
    _believe_everything(patch)


@plant
def window_blocks_never_freed(patch: Patch) -> None:
    """Leak: a window's group holds as much as a full one."""
    patch.setattr(GroupBlocks, "take_dead", lambda self, num_computed, block_size: [])
    _believe_everything(patch)


@plant
def hit_across_a_gap_in_a_window(patch: Patch) -> None:
    """False hit: only a window's last block is looked up, so other entries stay from an earlier request in the slot."""

    def last_only(nodes: Sequence[Node], windows: Sequence[int | None], block_size: int) -> int:
        ends = (i for i in range(len(nodes), 0, -1) if GONE not in nodes[i - 1].block_ids)
        return next(ends, 0)

    def hold(self: BlockPool, block_id: int) -> None:
        if block_id != GONE:
            original_hold(self, block_id)

    def release(self: BlockPool, block_id: int) -> None:
        if block_id != GONE:
            original_release(self, block_id)

    original_hold, original_release = BlockPool.hold, BlockPool.release
    patch.setattr(table_module, "num_usable", last_only)
    patch.setattr(BlockPool, "hold", hold)
    patch.setattr(BlockPool, "release", release)
    _believe_everything(patch)


@plant
def hit_holds_one_position_less_than_the_window(patch: Patch) -> None:
    """False hit: the first query behind it sees one position more than the hit guarantees."""
    usable = table_module.num_usable

    def num_usable(nodes: Sequence[Node], windows: Sequence[int | None], block_size: int) -> int:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(group_module, "num_dead_blocks", _one_early)
            return usable(nodes, windows, block_size)

    patch.setattr(table_module, "num_usable", num_usable)


@plant
def evicted_window_block_stays_in_its_node(patch: Patch) -> None:
    """False hit: a window's block was given to another request, and the node still names it."""
    drop = PrefixIndex.drop

    def keep(self: PrefixIndex, block_id: int) -> list[int]:
        if self._is_full[self._by_block[block_id].block_ids.index(block_id)]:
            return drop(self, block_id)
        return [block_id]

    patch.setattr(PrefixIndex, "drop", keep)
    _believe_everything(patch)


@plant
def evicted_full_block_leaves_the_windows(patch: Patch) -> None:
    """False hit: without a block of full attention a chain is still hit as far as the windows reach."""
    patch.setattr(PrefixIndex, "drop_node", lambda self, node: [])

    def drop(self: PrefixIndex, block_id: int) -> list[int]:
        node = self._by_block.pop(block_id)
        node.block_ids[node.block_ids.index(block_id)] = GONE
        return [block_id]

    patch.setattr(PrefixIndex, "drop", drop)
    _believe_everything(patch)


@plant
def tables_of_two_groups_are_mixed_up(patch: Patch) -> None:
    """The worker gets the blocks of one group as those of the next."""
    take_appended = BlockTable.take_appended

    def mixed(self: BlockTable) -> tuple[Appended, ...]:
        num_groups = len(self._groups)
        return tuple(
            Appended((gained.group + 1) % num_groups, gained.first, gained.block_ids) for gained in take_appended(self)
        )

    patch.setattr(BlockTable, "take_appended", mixed)


@plant
def hit_of_a_window_is_sent_from_entry_nought(patch: Patch) -> None:
    """Off by the dead entries: a window's first held block is sent as the table's first."""

    def take_appended(self: GroupBlocks) -> Appended:
        first, self.num_sent = self.num_sent, len(self.blocks)
        return Appended(self.group, 0 if first == self.first else first, tuple(self.blocks[first:]))

    patch.setattr(GroupBlocks, "take_appended", take_appended)


@plant
def admitted_without_room_in_a_window(patch: Patch) -> None:
    """Off by a step: a request starts with its hit but without a block for its first row in a window."""
    at_start = GroupBlocks.most_entries

    def hit_only(self: GroupBlocks, num_cached: int, num_tokens: int, step_tokens: int, block_size: int) -> int:
        if self.window:
            return num_cached // block_size
        return at_start(self, num_cached, num_tokens, step_tokens, block_size)

    patch.setattr(GroupBlocks, "most_entries", hit_only)


@plant
def tombstones_stay(patch: Patch) -> None:
    """Leak: nodes that lead to no block stay in the index."""
    patch.setattr(PrefixIndex, "_prune", lambda self, node: None)
    _believe_everything(patch)


@plant
def tombstones_are_unbounded(patch: Patch) -> None:
    """Leak: the index grows with the number of computed tokens, not with the pool."""
    make = PrefixIndex._make_tombstone

    def unbounded(self: PrefixIndex, node: Node) -> list[int]:
        max_tombstones, self._max_tombstones = self._max_tombstones, len(self._tombstones) + 1
        forgotten = make(self, node)
        self._max_tombstones = max_tombstones
        return forgotten

    patch.setattr(PrefixIndex, "_make_tombstone", unbounded)
