"""The slots and blocks that requests hold. A starting request takes them and a preempted one gives them back.

They become free only after the last launched row that can touch them. Owns the running requests, the ended or preempted
ones with rows in flight, the free slots, the leaders of shared prefixes, and the watermark. Knows no budget, no plan,
and not which request is to start next.
"""

from __future__ import annotations

from inferd.engine.cache.pool import BlockPool
from inferd.engine.cache.table import KVCache
from inferd.engine.sched.entry import NO_SLOT, Entry, RunningSet, State
from inferd.engine.sched.fairness.fair import Shares
from inferd.engine.sched.fairness.queue import FairQueue
from inferd.engine.sched.shared_prefix import PrefixSharing


class SlotTable:
    """The slots of one scheduler."""

    def __init__(self, num_slots: int, cache: KVCache, shares: Shares, waiting: FairQueue) -> None:
        self.running = RunningSet()
        self.draining: set[Entry] = set()
        """Preempted and finished entries with launched rows."""
        self.free_slots = list(range(num_slots - 1, -1, -1))
        """Slots that no request holds and no launched row uses."""
        self.sharing = PrefixSharing()
        self.num_preemptions = 0
        self.claimant: Entry | None = None
        """The running entry that last asked for memory and for which others are being preempted."""
        self._cache, self._shares, self._waiting = cache, shares, waiting

    @property
    def in_use(self) -> bool:
        """Whether some request holds blocks, and may need more."""
        return bool(len(self.running) or self.draining)

    def take(self, entry: Entry, num_cached: int) -> None:
        """Give a slot to an entry that the cache admitted after `num_cached` positions. It runs from now on."""
        entry.state, entry.slot = State.RUNNING, self.free_slots.pop()
        self.running.add(entry)
        self._shares.add_running(entry.request.scheduling.tenant, 1)
        if self._cache.shares_prefixes:
            first_own = num_cached // self._cache.block_size
            own_keys = entry.table.keys(first_own, entry.table.num_full)
            self.sharing.lead(entry, own_keys, num_cached, self._cache.block_size)

    def grow(self, entry: Entry, num_tokens: int) -> bool:
        """Extend the block table, preempting entries that rank behind if necessary.

        False if no entry ranks behind. Also False if enough blocks are about to be freed anyway: by a draining entry,
        by a victim that ends with its launched row, or by the entry's own launched rows.
        """
        request, table = entry.request, entry.table
        while not table.extend(num_tokens):
            victim = None if self.draining else self._victim(entry)
            if self.draining or (victim is not None and victim.request.num_pending == 0):
                self.claimant = entry
                return False
            if victim is None:
                self._drop_claim(entry)
                return False
            if request.in_flight and table.can_extend_after(request.scheduled, num_tokens):
                return False
            self.preempt(victim)
        self._drop_claim(entry)
        return True

    def _drop_claim(self, entry: Entry) -> None:
        if self.claimant is entry:
            self.claimant = None

    def _victim(self, entry: Entry) -> Entry | None:
        if self._shares.has_one_tenant:
            return self.running.victim(entry)
        return self._shares.victim(self.running, entry)

    def preempt(self, entry: Entry) -> None:
        """Stop a running entry. It is computed again from its ids when it is admitted again."""
        self.num_preemptions += 1
        self.stop_running(entry)
        entry.state = State.PREEMPTED
        if entry.request.in_flight:
            self.draining.add(entry)
        else:
            self._requeue(entry)

    def stop_running(self, entry: Entry) -> None:
        """Give the entry no more rows. It keeps its slot and blocks."""
        self.running.remove(entry)
        self._drop_claim(entry)
        self._shares.add_running(entry.request.scheduling.tenant, -1)
        self._wake(self.sharing.leave(entry))

    def retire(self, entry: Entry) -> None:
        """Mark an entry as ended, in any state. Its slot and blocks are freed with its last row in flight."""
        entry.state = State.FINISHED
        if entry.request.in_flight == 0:
            self.draining.discard(entry)
            self._close(entry)
        else:
            self.draining.add(entry)

    def has_computed(self, entry: Entry) -> None:
        """Index the blocks that were computed, and wake the waiters that waited for them."""
        entry.table.commit(entry.request.computed)
        if entry.leading:
            self._wake(self.sharing.advance(entry, entry.request.computed))

    def drain(self, entry: Entry) -> None:
        """Count one row fewer in flight for an entry that no longer runs. After the last one, its slot and blocks are
        freed."""
        if entry.request.in_flight:
            return
        self.draining.remove(entry)
        if entry.state is State.PREEMPTED:
            self._requeue(entry)
        else:
            self._close(entry)

    def give_back(self, entry: Entry) -> None:
        """Free the entry's slot and blocks, if it has any. No launched row can touch them any more."""
        entry.table.release()
        if entry.slot != NO_SLOT:
            self.free_slots.append(entry.slot)
            entry.slot = NO_SLOT

    def check(self, num_slots: int) -> None:
        """Raises `AssertionError`."""
        self.sharing.check()
        slots = [entry.slot for entry in (*self.running, *self.draining)] + self.free_slots
        assert sorted(slots) == list(range(num_slots)), f"slots {slots}"
        assert all(entry.state is State.RUNNING for entry in self.running)
        assert all(entry.request.in_flight > 0 for entry in self.draining)

    def _wake(self, waiters: list[Entry]) -> None:
        for waiter in waiters:
            waiter.state = State.WAITING
            self._waiting.push(waiter)

    def _requeue(self, entry: Entry) -> None:
        self.give_back(entry)
        entry.request.rewind()
        entry.num_to_compute = entry.request.total
        entry.state = State.WAITING
        self._waiting.push(entry)

    def _close(self, entry: Entry) -> None:
        self.give_back(entry)
        self._cache.close(entry.table)


class Watermark:
    """Whether a starting request may take blocks: the free ones, less a reserve for running requests to grow into."""

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
