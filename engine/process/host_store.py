"""Host memory that keeps pieces of prefixes which a GPU's pool evicts: bounded, checked, and shared fairly by tenants.

It is divided into pages of the size of a block. A row of a piece takes as many whole pages as it needs. The memory is
allocated in chunks when it is first needed: to pin it takes time, and a restarted engine should serve at once. A piece
is found once it is complete. Each read compares its checksum before any byte is used. Knows no device and no threads
but the lock.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from xxhash import xxh3_128

from inferd.engine.api.kv_store.segment import Blocks, Damaged, Missing, NotWritten
from inferd.engine.cache.below import Piece

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 2**20
"""Least bytes of a chunk: nobody has measured yet how long a GPU's steps wait while one is pinned."""
_LEAST_PAGES = 8
"""Least pages of a chunk, whose rest is wasted."""

Key = tuple[bytes, bool]
"""(chain key, whether a state is a part of it) of a tenant's piece."""


@dataclass(eq=False, slots=True)
class Kept:
    """A piece in the memory, or on its way there."""

    salt: str
    key: Key
    sizes: tuple[int, ...]
    """Number of bytes of each row."""
    pages: list[memoryview]
    page_bytes: int
    checksum: bytes = b""
    num_readers: int = 0
    is_kept: bool = True
    """Whether it is found. Otherwise its pages are free once nobody reads it."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return len(self.pages) * self.page_bytes

    @property
    def buffers(self) -> Blocks:
        """The memory of each row."""
        found, pages = list[list[memoryview]](), iter(self.pages)
        for size in self.sizes:
            starts = range(0, size, self.page_bytes)
            found.append([next(pages)[: size - start] for start in starts])
        return found

    def digest(self) -> bytes:
        sum_ = xxh3_128()
        for row in self.buffers:
            for part in row:
                sum_.update(part)
        return sum_.digest()


class HostStore:
    """The memory of one engine. One thread writes, another one reads, and a third looks pieces up and drops them."""

    def __init__(
        self,
        quota_bytes: int,
        page_bytes: int,
        allocate: Callable[[int], memoryview],
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        """`quota_bytes`: most bytes that are allocated. `allocate` gives so many bytes, a power of two, or raises
        `RuntimeError` or `MemoryError`."""
        wanted_bytes = max(chunk_bytes, _power_of_two_from(_LEAST_PAGES * page_bytes))
        self._chunk_bytes = min(wanted_bytes, _power_of_two_up_to(quota_bytes))
        self._page_bytes, self._allocate = page_bytes, allocate
        self._num_chunks_left = quota_bytes // self._chunk_bytes
        self._most_pages = self._num_chunks_left * (self._chunk_bytes // page_bytes)
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._by_tenant: dict[str, OrderedDict[Key, Kept]] = {}
        """The pieces of each tenant, the one used least recently first."""
        self._bytes_of: dict[str, int] = {}
        self._largest: list[tuple[int, str]] = []
        """A heap of (-bytes, tenant). Entries that no longer say what a tenant has are skipped."""
        self.num_bytes = 0
        """Bytes of all pieces."""

    # -- looking up --------------------------------------------------------------------------------------------------

    def sizes(self, salt: str, piece: Piece) -> tuple[int, ...] | None:
        """Number of bytes of each row of a piece; None if it is not there."""
        with self._lock:
            kept = self._find(salt, _key_of(piece))
            return None if kept is None else kept.sizes

    def renew(self, salt: str, piece: Piece) -> bool:
        """Count a piece as used now. False if it is not there."""
        with self._lock:
            kept = self._find(salt, _key_of(piece))
            if kept is not None:
                self._by_tenant[salt].move_to_end(kept.key)
            return kept is not None

    def drop(self, salt: str, keys: Sequence[bytes]) -> None:
        """Drop all pieces that end at one of these keys."""
        with self._lock:
            for key in keys:
                for has_state in (False, True):
                    kept = self._find(salt, (key, has_state))
                    if kept is not None:
                        self._drop(kept)

    def clear(self) -> int:
        """Drop all pieces, and return their number."""
        with self._lock:
            all_kept = [kept for of_tenant in self._by_tenant.values() for kept in of_tenant.values()]
            for kept in all_kept:
                self._drop(kept)
            return len(all_kept)

    def _find(self, salt: str, key: Key) -> Kept | None:
        of_tenant = self._by_tenant.get(salt)
        return None if of_tenant is None else of_tenant.get(key)

    # -- writing -----------------------------------------------------------------------------------------------------

    def reserve(self, salt: str, piece: Piece, sizes: Sequence[int]) -> Kept:
        """Memory for a piece, evicting others if necessary. It is to be filled, and then kept or given back. Raises
        `NotWritten`."""
        num_pages = sum(-(-size // self._page_bytes) for size in sizes)
        pages = self._take(num_pages)
        while pages is None:
            self._grow()
            pages = self._take(num_pages)
        return Kept(salt, _key_of(piece), tuple(sizes), pages, self._page_bytes, is_kept=False)

    def _take(self, num_pages: int) -> list[memoryview] | None:
        """So many pages; None if more memory may be allocated. Raises `NotWritten`."""
        with self._lock:
            if num_pages > self._most_pages:
                raise NotWritten(
                    f"a piece takes {num_pages} pages of {self._page_bytes} bytes, and there is memory for "
                    f"{self._most_pages}"
                )
            while len(self._free) < num_pages:
                if self._num_chunks_left:
                    return None
                if not self._evict():
                    raise NotWritten(f"{num_pages} pages of host memory are needed, and {len(self._free)} are free")
            taken = self._free[len(self._free) - num_pages :]
            del self._free[len(self._free) - num_pages :]
            return taken

    def _grow(self) -> None:
        """Allocate a chunk. It takes a while, so nobody else has to wait for it."""
        num_pages = self._chunk_bytes // self._page_bytes
        try:
            chunk = self._allocate(self._chunk_bytes)
        except (RuntimeError, MemoryError) as error:
            with self._lock:
                self._most_pages -= self._num_chunks_left * num_pages
                self._num_chunks_left = 0
            left_bytes = self._most_pages * self._page_bytes
            logger.warning("kv_host gets no more memory than %d bytes, and serves with these: %s", left_bytes, error)
            return
        with self._lock:
            self._num_chunks_left -= 1
            starts = range(0, num_pages * self._page_bytes, self._page_bytes)
            self._free += [chunk[start : start + self._page_bytes] for start in starts]

    def _evict(self) -> bool:
        """Drop the least recently used piece of the tenant that has the most bytes. False if there is none."""
        while self._largest:
            num_bytes, salt = self._largest[0]
            if self._bytes_of.get(salt, 0) == -num_bytes and num_bytes:
                self._drop(next(iter(self._by_tenant[salt].values())))
                return True
            heapq.heappop(self._largest)
        return False

    def keep(self, kept: Kept) -> None:
        """Let a piece be found, whose memory was filled. If it is there already, the new one is given back."""
        kept.checksum = kept.digest()
        with self._lock:
            of_tenant = self._by_tenant.setdefault(kept.salt, OrderedDict())
            if kept.key in of_tenant:
                self._free += kept.pages
                return
            of_tenant[kept.key], kept.is_kept = kept, True
            self._count(kept.salt, kept.num_bytes)

    def give_back(self, kept: Kept) -> None:
        """Free the memory of a piece that was reserved and is not to be kept."""
        with self._lock:
            self._free += kept.pages

    def take_back(self, kept: Kept) -> None:
        """Drop a piece that was kept, unless it was dropped already."""
        with self._lock:
            if kept.is_kept:
                self._drop(kept)

    def _count(self, salt: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        of_tenant = self._bytes_of[salt] = self._bytes_of.get(salt, 0) + num_bytes
        if not of_tenant:
            del self._bytes_of[salt], self._by_tenant[salt]
            return
        heapq.heappush(self._largest, (-of_tenant, salt))
        if len(self._largest) > 4 * len(self._bytes_of) + 64:
            self._largest = [(-size, tenant) for tenant, size in self._bytes_of.items()]
            heapq.heapify(self._largest)

    def _drop(self, kept: Kept) -> None:
        del self._by_tenant[kept.salt][kept.key]
        kept.is_kept = False
        self._count(kept.salt, -kept.num_bytes)
        if not kept.num_readers:
            self._free += kept.pages

    # -- reading -----------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, salt: str, piece: Piece) -> Iterator[Blocks]:
        """The memory of a piece, which stays as it is meanwhile, and which is what was written. It counts as used.
        Raises `Missing`, and `Damaged`: then it is dropped."""
        with self._lock:
            kept = self._find(salt, _key_of(piece))
            if kept is None:
                raise Missing("it is not in host memory")
            self._by_tenant[salt].move_to_end(kept.key)
            kept.num_readers += 1
        try:
            if kept.digest() != kept.checksum:
                self.take_back(kept)
                raise Damaged("host memory does not hold what was written: the checksum of a piece is wrong")
            yield kept.buffers
        finally:
            with self._lock:
                kept.num_readers -= 1
                if not kept.num_readers and not kept.is_kept:
                    self._free += kept.pages


def _key_of(piece: Piece) -> Key:
    return piece.key, piece.has_state


def _power_of_two_from(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _power_of_two_up_to(number: int) -> int:
    return 1 << (number.bit_length() - 1)
