"""The KV cache as its users see it: a `BlockTable` per request, extended, committed and released without block lists.

Owns what pool and index must agree on: eviction, and that a block is found only after its ids were applied. Layers form
cache groups by attention kind; there is one so far, `FULL_GROUP`, and only this file would see more. Knows no steps, no
queue and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from inferd.engine.cache.pool import BlockPool
from inferd.engine.cache.prefix import HashBlock, Node, PrefixIndex, blake2b_block
from inferd.engine.request import Request

FULL_GROUP = 0
"""The cache group of layers that attend to every position."""


@dataclass(frozen=True, slots=True)
class Appended:
    """Blocks that a table gained: `block_ids[i]` is entry `first + i` of cache group `group`."""

    group: int
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the cache holds of a request's ids right now; valid until the cache changes."""

    nodes: tuple[Node, ...]
    num_tokens: int
    num_unheld: int
    """Blocks of the match that nobody holds: admitting takes them off the free ones."""


class KVCache:
    """The pool, the index, and the tables open on them."""

    def __init__(
        self, num_blocks: int, block_size: int, *, shares_prefixes: bool = True, hash_block: HashBlock = blake2b_block
    ) -> None:
        """Without `shares_prefixes` nothing enters the index, and so nothing is found in it."""
        if block_size < 1:
            raise ValueError(f"a block holds at least one token, not {block_size}")
        self.block_size = block_size
        self.shares_prefixes = shares_prefixes
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(hash_block)
        self._open: set[BlockTable] = set()

    @property
    def max_tokens(self) -> int:
        """Positions that one request alone can hold."""
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open(self, request: Request) -> BlockTable:
        """A table without blocks; `close` it when the request is over."""
        table = BlockTable(self, request)
        self._open.add(table)
        return table

    def close(self, table: BlockTable) -> None:
        assert table.capacity == 0, "a table was closed with blocks"
        self._open.remove(table)

    def take(self, num_blocks: int) -> list[int] | None:
        """Blocks for a table, evicting cached ones as needed; None where not enough are free."""
        pool = self.pool
        if pool.num_free < num_blocks:
            return None
        while pool.num_empty < num_blocks:
            self.forget(pool.oldest_cached())
        return pool.take(num_blocks)

    def forget(self, block_id: int) -> None:
        """Drop an indexed block from the index, with all that lies behind it."""
        for dropped in self.index.drop(block_id):
            self.pool.clear_content(dropped)

    def reset(self) -> None:
        """Forget every cached block that no request holds."""
        while self.pool.num_cached:
            self.forget(self.pool.oldest_cached())

    def check(self) -> None:
        """Pool, tables and index agree: every reference is a table's, every block with content is an indexed one."""
        self.pool.check()
        self.index.check()
        refs: Counter[int] = Counter()
        for table in self._open:
            table.check()
            refs.update(table.block_ids)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.num_refs(block_id) == refs[block_id], f"block {block_id}: a reference nobody owns"
            assert self.pool.has_content(block_id) == self.index.holds(block_id), f"block {block_id}: index and pool"


class BlockTable:
    """One request's blocks, in order of position. Empty until admitted and after `release`."""

    __slots__ = (
        "_blocks",
        "_cache",
        "_is_sealed",
        "_keys",
        "_num_indexed",
        "_num_sent",
        "_request",
        "_tail",
        "capacity",
    )

    def __init__(self, cache: KVCache, request: Request) -> None:
        self._cache = cache
        self._request = request
        self._keys = [cache.index.root_key(request.cache_salt)]
        self._clear()

    def _clear(self) -> None:
        self._blocks: list[int] = []
        self._num_sent = 0
        self._tail: Node | str = self._request.cache_salt
        self._num_indexed = 0
        self._is_sealed = not self._cache.shares_prefixes
        self.capacity = 0
        """Positions that the blocks can hold."""

    @property
    def block_ids(self) -> tuple[int, ...]:
        """For checks: nothing that schedules may look at it."""
        return tuple(self._blocks)

    @property
    def num_hittable(self) -> int:
        """Leading full blocks that a prefix hit may cover: at least one known token is left to compute."""
        return (len(self._request.ids) - 1) // self._cache.block_size if self.takes_hits else 0

    @property
    def takes_hits(self) -> bool:
        """Whether this request may use blocks that others computed."""
        return self._cache.shares_prefixes and self._request.takes_prefix_hits

    @property
    def num_full(self) -> int:
        """Leading blocks that the known ids fill."""
        return len(self._request.ids) // self._cache.block_size

    def key(self, index: int) -> bytes:
        """The chain key of block `index`, which known ids must fill. Computed once: ids never change."""
        keys = self._keys
        while len(keys) <= index + 1:
            keys.append(self._cache.index.block_key(keys[-1], self._block_ids_at(len(keys) - 1)))
        return keys[index + 1]

    def keys(self, first: int, end: int) -> Iterator[bytes]:
        """The chain keys of blocks `first` to `end - 1`."""
        return map(self.key, range(first, end))

    def _block_ids_at(self, index: int) -> tuple[int, ...]:
        size = self._cache.block_size
        ids = tuple(self._request.ids[index * size : (index + 1) * size])
        assert len(ids) == size, f"block {index} is not full of known ids"
        return ids

    def match(self) -> PrefixMatch:
        """The longest prefix of the known ids that the index holds, bounded by `num_hittable`."""
        index, pool = self._cache.index, self._cache.pool
        nodes: list[Node] = []
        parent: Node | str = self._request.cache_salt
        for i in range(self.num_hittable):
            node = index.find(parent, self.key(i), self._block_ids_at(i))
            if node is None:
                break
            nodes.append(node)
            parent = node
        num_unheld = sum(not pool.is_held(node.block_id) for node in nodes)
        return PrefixMatch(tuple(nodes), len(nodes) * self._cache.block_size, num_unheld)

    def num_free_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free blocks that `admit` would take."""
        return self._cache.num_blocks_for(num_tokens) - len(match.nodes) + match.num_unheld

    def admit(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Hold the matched blocks and take the rest, up to `num_tokens` positions; without room, do nothing: false."""
        assert not self._blocks, "admitted twice"
        if self.num_free_needed(match, num_tokens) > self._cache.pool.num_free:
            return False
        for node in match.nodes:
            self._cache.pool.hold(node.block_id)
            self._blocks.append(node.block_id)
        if match.nodes:
            self._tail, self._num_indexed = match.nodes[-1], len(match.nodes)
        self.capacity = len(self._blocks) * self._cache.block_size
        extended = self.extend(num_tokens)
        assert extended, "the room counted was not there"
        return True

    def extend(self, num_tokens: int) -> bool:
        """Make room for `num_tokens` positions in all; false, and nothing done, where the pool has not enough."""
        num_missing = self._cache.num_blocks_for(num_tokens) - len(self._blocks)
        if num_missing > 0:
            taken = self._cache.take(num_missing)
            if taken is None:
                return False
            self._blocks.extend(taken)
            self.capacity = len(self._blocks) * self._cache.block_size
        return True

    def take_appended(self) -> tuple[Appended, ...]:
        """What the table gained since the last call, one entry per cache group that gained any."""
        first = self._num_sent
        if first == len(self._blocks):
            return ()
        self._num_sent = len(self._blocks)
        return (Appended(FULL_GROUP, first, tuple(self._blocks[first:])),)

    def commit(self, num_computed: int) -> None:
        """Index the blocks that `num_computed` applied positions fill."""
        size = self._cache.block_size
        while (self._num_indexed + 1) * size <= num_computed and not self._is_sealed:
            i = self._num_indexed
            node = self._cache.index.insert(self._tail, self.key(i), self._block_ids_at(i), self._blocks[i])
            if node is None:
                self._is_sealed = True
                return
            if node.block_id == self._blocks[i]:
                self._cache.pool.mark_content(node.block_id)
            self._tail = node
            self._num_indexed += 1

    def forget(self) -> None:
        """Drop every block of this table from the index: what they hold is not to be trusted."""
        for block_id in self._blocks:
            if self._cache.index.holds(block_id):
                self._cache.forget(block_id)
        self._is_sealed = True

    def release(self) -> None:
        """Give all blocks back, the deepest first, so that a chain is evicted from its end."""
        for block_id in reversed(self._blocks):
            self._cache.pool.release(block_id)
        self._clear()

    def check(self) -> None:
        assert len(set(self._blocks)) == len(self._blocks), "a block is twice in one table"
        assert self._num_sent <= len(self._blocks)
        assert self.capacity == len(self._blocks) * self._cache.block_size
        assert self._num_indexed <= len(self._blocks)
        assert len(self._keys) <= self.num_full + 1
        assert not self._blocks or self._request.scheduled <= self.capacity, "positions without a block"
