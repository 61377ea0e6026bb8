"""The blocks of the KV pool: how many references each has, which are free, and which free ones still hold a prefix.

Knows block ids and nothing else: no tokens, no requests, no hashes. Every operation is O(1) per block. A free block is
either empty or cached. A cached block is held by no request, but the prefix index can still reach its content. Cached
blocks are ordered by age, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class BlockPool:
    """`num_blocks` blocks, ids 0 to `num_blocks - 1`."""

    def __init__(self, num_blocks: int, on_clear: Callable[[int], None] | None = None) -> None:
        """`on_clear` is called with each block that the prefix index no longer reaches, before anything else may be
        written to it."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._on_clear = on_clear
        self._num_refs = [0] * num_blocks
        self._num_shared = 0
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._has_content = bytearray(num_blocks)
        self._num_cleared = [0] * num_blocks

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        """Blocks that no request holds and that still hold a prefix."""
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_shared(self) -> int:
        """Blocks that several requests hold."""
        return self._num_shared

    def is_held(self, block_id: int) -> bool:
        return self._num_refs[block_id] > 0

    def num_refs(self, block_id: int) -> int:
        return self._num_refs[block_id]

    def take(self, num_blocks: int) -> list[int]:
        """Take empty blocks, with one reference each. The caller has made sure that `num_empty >= num_blocks`."""
        assert num_blocks <= len(self._empty), f"{num_blocks} blocks asked, {len(self._empty)} empty"
        taken = self._empty[: -num_blocks - 1 : -1]
        del self._empty[len(self._empty) - num_blocks :]
        for block_id in taken:
            self._num_refs[block_id] = 1
        return taken

    def hold(self, block_id: int) -> None:
        """Add a reference to a block with content, held or cached."""
        assert self._has_content[block_id], f"block {block_id} holds no prefix"
        if self._num_refs[block_id] == 0:
            del self._cached[block_id]
        self._num_refs[block_id] += 1
        self._num_shared += self._num_refs[block_id] == 2

    def release(self, block_id: int) -> None:
        """Give one reference back. The last one frees the block; with content it becomes the youngest cached block."""
        assert self._num_refs[block_id] > 0, f"block {block_id} released and not held"
        self._num_refs[block_id] -= 1
        self._num_shared -= self._num_refs[block_id] == 1
        if self._num_refs[block_id] == 0:
            if self._has_content[block_id]:
                self._cached[block_id] = None
            else:
                self._empty.append(block_id)

    def adopt(self, block_ids: Sequence[int]) -> None:
        """Count these empty blocks as cached, the first to evict first."""
        adopted = set(block_ids)
        self._empty = [block_id for block_id in self._empty if block_id not in adopted]
        for block_id in block_ids:
            self._has_content[block_id] = 1
            self._cached[block_id] = None

    def mark_content(self, block_id: int) -> None:
        """Record that the prefix index reaches this held block from now on."""
        assert self._num_refs[block_id] > 0, f"block {block_id} indexed and not held"
        self._has_content[block_id] = 1

    def clear_content(self, block_id: int) -> None:
        """Record that the prefix index no longer reaches this block. If no request holds it, it becomes empty."""
        self._has_content[block_id] = 0
        self._num_cleared[block_id] += 1
        if self._on_clear is not None:
            self._on_clear(block_id)
        if block_id in self._cached:
            del self._cached[block_id]
            self._empty.append(block_id)

    def make_oldest(self, block_id: int) -> None:
        """Let this block be the next to evict, if nobody holds it."""
        if block_id in self._cached:
            self._cached.move_to_end(block_id, last=False)

    def oldest_cached(self) -> int:
        """The next block to evict. Raises `StopIteration` if none is cached."""
        return next(iter(self._cached))

    def cached_blocks(self) -> tuple[int, ...]:
        """Cached blocks, oldest first."""
        return tuple(self._cached)

    def empty_blocks(self) -> tuple[int, ...]:
        """Blocks whose content no request may read."""
        return tuple(self._empty)

    def has_content(self, block_id: int) -> bool:
        return bool(self._has_content[block_id])

    def num_cleared(self, block_id: int) -> int:
        """Times that the prefix index lost this block. While it is the same, content that the index reached stays."""
        return self._num_cleared[block_id]

    def check(self) -> None:
        """Assert that every block is exactly one of held, cached and empty, and that the shared ones are counted."""
        empty, cached = set(self._empty), set(self._cached)
        assert len(empty) == len(self._empty), "a block is free twice"
        assert not empty & cached, f"blocks {empty & cached} are both empty and cached"
        num_shared = 0
        for block_id, num_refs in enumerate(self._num_refs):
            num_shared += num_refs > 1
            is_free = block_id in empty or block_id in cached
            assert (num_refs == 0) == is_free, f"block {block_id}: {num_refs} references, {is_free=}"
            if is_free:
                assert (block_id in cached) == bool(self._has_content[block_id]), f"block {block_id} on the wrong list"
        assert num_shared == self._num_shared, f"{num_shared} blocks are shared, and {self._num_shared} counted"
