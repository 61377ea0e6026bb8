"""Whether a request that starts may take blocks, and for whom they were short last. Knows no order."""

from __future__ import annotations

from inferd.engine.cache.pool import BlockPool
from inferd.engine.sched.entry import Entry


class Watermark:
    """Free blocks, but for those that are left to requests that run, to grow into."""

    def __init__(self, pool: BlockPool, watermark: float) -> None:
        """`watermark`: the share of all blocks that is left to them."""
        self._pool = pool
        self._watermark_blocks = int(watermark * pool.num_blocks)
        self._blocked: tuple[Entry, int] | None = None
        """The head of the queue for which memory was short, and the free blocks that it waits for."""

    def is_awaited_by(self, entry: Entry | None) -> bool:
        """Whether it was this one for which memory was short last."""
        return self._blocked is not None and self._blocked[0] is entry

    def is_short(self, entry: Entry, *, is_shared: bool) -> bool:
        """Spares the head of the queue a walk through the index each step while memory is short.

        A hit that grew meanwhile is seen late: once so many blocks are free as it would have needed without.
        """
        if self._blocked is None or self._blocked[0] is not entry:
            return False
        return self._pool.num_free < self._blocked[1] + self.reserve(is_shared=is_shared)

    def has(self, entry: Entry, num_blocks: int, *, is_shared: bool) -> bool:
        """Whether so many free blocks may go to it."""
        if num_blocks + self.reserve(is_shared=is_shared) <= self._pool.num_free:
            self._blocked = None
            return True
        self._blocked = (entry, num_blocks)
        return False

    def reserve(self, *, is_shared: bool) -> int:
        """Blocks left to others, where others hold some."""
        return self._watermark_blocks if is_shared else 0
