"""Whether a starting request may take blocks. Keeps some free for running requests to grow into. Knows no order."""

from __future__ import annotations

from inferd.engine.cache.pool import BlockPool
from inferd.engine.sched.entry import Entry


class Watermark:
    """The free blocks, less a reserve for running requests."""

    def __init__(self, pool: BlockPool, watermark: float) -> None:
        """`watermark`: share of all blocks that is the reserve."""
        self._pool = pool
        self._watermark_blocks = int(watermark * pool.num_blocks)
        self._blocked: tuple[Entry, int] | None = None
        """The entry at the head of the queue for which memory was short, and the free blocks that it needs."""

    def is_awaited_by(self, entry: Entry | None) -> bool:
        """Whether memory was last short for this entry."""
        return self._blocked is not None and self._blocked[0] is entry

    def is_short(self, entry: Entry, *, in_use: bool) -> bool:
        """Whether memory is still short for this entry. Skips the prefix lookup for the queue's head while it is.

        A prefix hit that grew in the meantime is seen late: only once the blocks needed without it are free.
        """
        if self._blocked is None or self._blocked[0] is not entry:
            return False
        return self._pool.num_free < self._blocked[1] + self.reserve(in_use=in_use)

    def has(self, entry: Entry, num_blocks: int, *, in_use: bool) -> bool:
        """Whether this entry may take so many free blocks. Remembers it if not."""
        if num_blocks + self.reserve(in_use=in_use) <= self._pool.num_free:
            self._blocked = None
            return True
        self._blocked = (entry, num_blocks)
        return False

    def reserve(self, *, in_use: bool) -> int:
        """Blocks kept free, if other requests hold some."""
        return self._watermark_blocks if in_use else 0
