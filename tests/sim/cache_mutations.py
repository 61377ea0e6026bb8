"""Planted bugs of block pool, tables and prefix index. See `tests.sim.planting`."""

from __future__ import annotations

from inferd.engine.cache.group import PrefixMatch
from inferd.engine.cache.pool import BlockPool
from inferd.engine.cache.prefix import Change, Node, PrefixIndex
from inferd.engine.cache.table import BlockTable, KVCache
from inferd.engine.request import Request
from inferd.engine.sched.entry import Entry
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.sched.step_planner import PlanBuilder
from tests.sim.planting import Patch, Plants

plant = Plants()


@plant
def blocks_returned_while_a_row_is_in_flight(patch: Patch) -> None:
    """Early free: a finished request frees its blocks while a launched step still reads and writes them."""
    finish = Scheduler.finish

    def early(self: Scheduler, request: Request, *, forget_blocks: bool = False) -> None:
        entry = self._entries[request]
        finish(self, request, forget_blocks=forget_blocks)
        entry.table.release()

    patch.setattr(Scheduler, "finish", early)


@plant
def block_freed_twice(patch: Patch) -> None:
    """Double free: the last reference puts a block on the free list twice."""
    release = BlockPool.release

    def twice(self: BlockPool, block_id: int) -> None:
        release(self, block_id)
        if block_id in self._empty[-1:]:
            self._empty.append(block_id)

    patch.setattr(BlockPool, "release", twice)


@plant
def hit_takes_no_reference(patch: Patch) -> None:
    """Skipped reference count: a prefix hit shares a block without holding it."""
    hold, release = BlockPool.hold, BlockPool.release

    def no_reference(self: BlockPool, block_id: int) -> None:
        hold(self, block_id)
        if self._num_refs[block_id] > 1:
            self._num_refs[block_id] -= 1

    def tolerant(self: BlockPool, block_id: int) -> None:
        if self._num_refs[block_id]:
            release(self, block_id)

    patch.setattr(BlockPool, "hold", no_reference)
    patch.setattr(BlockPool, "release", tolerant)


@plant
def evicted_block_stays_indexed(patch: Patch) -> None:
    """A cached block is given to another request, and its content can still be hit."""

    def forget(self: KVCache, block_id: int) -> None:
        self.pool.clear_content(block_id)

    patch.setattr(KVCache, "forget", forget)


@plant
def held_descendants_of_an_evicted_block_stay_indexed(patch: Patch) -> None:
    """Eviction removes one node and leaves the nodes behind it, so their chain has a hole."""

    def drop_node(self: PrefixIndex, node: Node) -> list[int]:
        del self._by_key[node.key]
        node.is_live = False
        return [block_id for block_id in node.block_ids if self._by_block.pop(block_id, None)]

    patch.setattr(PrefixIndex, "drop_node", drop_node)


@plant
def last_partial_block_not_counted(patch: Patch) -> None:
    """Off by one: the last, partly filled block is not allocated."""
    patch.setattr(KVCache, "num_blocks_for", lambda self, num_tokens: max(1, num_tokens // self.block_size))


@plant
def table_grows_one_token_late(patch: Patch) -> None:
    """Off by one: a full table takes one more token."""
    extend = BlockTable.extend
    patch.setattr(BlockTable, "extend", lambda self, num_tokens: extend(self, num_tokens - 1))


@plant
def table_of_a_resumed_request_is_stale(patch: Patch) -> None:
    """After preemption only blocks beyond those sent before are sent again."""
    release, admit = BlockTable.release, BlockTable.admit
    num_sent: dict[BlockTable, list[int]] = {}

    def stale(self: BlockTable) -> None:
        num_sent[self] = [group.num_sent for group in self._groups]
        release(self)

    def resume(self: BlockTable, match: PrefixMatch, num_tokens: int) -> bool:
        is_admitted = admit(self, match, num_tokens)
        for group, sent in zip(self._groups, num_sent.get(self, ()), strict=False):
            group.num_sent = sent
        return is_admitted

    patch.setattr(BlockTable, "release", stale)
    patch.setattr(BlockTable, "admit", resume)
    patch.setattr(BlockTable, "check", lambda self: None)


@plant
def preempted_request_keeps_its_blocks(patch: Patch) -> None:
    """Preemption drops the table but not its references."""
    release = BlockTable.release

    def keep(self: BlockTable) -> None:
        if self._request.num_cached_tokens is not None and self._request.computed < self._request.num_needed:
            self._clear()
        else:
            release(self)

    patch.setattr(BlockTable, "release", keep)


def _ids_only(self: PrefixIndex, parent: Node | str, key: bytes, ids: tuple[int, ...]) -> Node | None:
    node = self._by_key.get(key)
    return node if node is not None and node.ids == ids else None


@plant
def hash_ignores_the_prefix(patch: Patch) -> None:
    """False hit: equal ids behind different prefixes are mistaken for each other."""
    block_key = PrefixIndex.block_key
    patch.setattr(PrefixIndex, "block_key", lambda self, parent_key, ids: block_key(self, b"", ids))
    patch.setattr(PrefixIndex, "find", _ids_only)


@plant
def hash_ignores_the_salt(patch: Patch) -> None:
    """False hit across tenants: the text is right, and reveals what another tenant has asked."""
    open_table = KVCache.open

    def unsalted(self: KVCache, request: Request) -> BlockTable:
        request.salt = ""
        return open_table(self, request)

    patch.setattr(KVCache, "open", unsalted)


@plant
def hash_hit_is_not_compared(patch: Patch) -> None:
    """False hit: a hash collision is not detected."""
    patch.setattr(PrefixIndex, "find", lambda self, parent, key, ids: self._by_key.get(key))


@plant
def only_the_own_ids_are_compared_on_a_hash_hit(patch: Patch) -> None:
    """False hit: a hash collision further up the chain is not detected."""
    patch.setattr(PrefixIndex, "find", _ids_only)


@plant
def blocks_indexed_one_token_early(patch: Patch) -> None:
    """Off by one: a block is indexed before its last position is computed."""
    commit = BlockTable.commit

    def early(self: BlockTable, num_computed: int) -> None:
        commit(self, min(num_computed + 1, len(self._request.ids), self.capacity))

    patch.setattr(BlockTable, "commit", early)


@plant
def blocks_indexed_before_they_are_applied(patch: Patch) -> None:
    """A launched row's blocks can be hit before it is known whether the row is valid."""
    add = PlanBuilder.add

    def eager(self: PlanBuilder, entry: Entry, num_tokens: int) -> None:
        add(self, entry, num_tokens)
        entry.table._index(min(entry.request.scheduled, len(entry.request.ids)))

    patch.setattr(PlanBuilder, "add", eager)


@plant
def whole_prompt_may_hit(patch: Patch) -> None:
    """A prefix hit covers every known token, so nothing is left to compute logits from."""

    def num_hittable(self: BlockTable) -> int:
        return self.num_full if self._request.takes_prefix_hits else 0

    patch.setattr(BlockTable, "num_hittable", property(num_hittable))


@plant
def prompt_logprobs_take_a_hit(patch: Patch) -> None:
    """A prefix hit skips positions whose logprobs were requested."""
    patch.setattr(Request, "takes_prefix_hits", property(lambda self: True))


@plant
def evictions_have_no_events(patch: Patch) -> None:
    """Gateways go on to send prompts to where their prefix was cached once."""
    take = PrefixIndex.take_changes

    def only_stored(self: PrefixIndex) -> tuple[bool, list[Change]]:
        was_emptied, changes = take(self)
        return was_emptied, [change for change in changes if change.is_stored]

    patch.setattr(PrefixIndex, "take_changes", only_stored)
