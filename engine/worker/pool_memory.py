"""The memory of a CPU's KV pool and states, which outlives the engine, and the ledger of what lies there.

The server holds it open (`engine/api/process/memory_file`), and one engine at a time uses it. It has a header, a record
for each place, and a region for each tensor. A record has the checksum of all bytes of its place, together with what
the record says. So a torn record, a place that was overwritten and content in the wrong place are found when the next
engine checks them.

An engine locks the file until all of its threads are gone. So the next one never reads what a dying one still writes.
Each engine has a number. Records count only if they come from an engine that laid the memory out as it lies now.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct

import torch
import xxhash
from torch import Tensor

from inferd.engine.api.process.memory_file import POOL_MEMORY, opened
from inferd.engine.cache.ledger import Entry

logger = logging.getLogger(__name__)

_HEADER = Struct("<32sQQ")
"""Digest of the layout, number of the first engine that laid the memory out like this, and of the last one."""
_RECORD = Struct("<QQQII32s")
"""Number of the engine that wrote it (0: there is none), checksum, use, group, depth, key."""
_CHECKED = Struct("<QII32s")
"""Place, group, depth and key, which the checksum covers too."""
_NUMBER = Struct("<Q")
"""The first part of a record, and its use."""
_USE_OFFSET = 16
_NO_DIGEST = bytes(32)
_ALIGNMENT = 2**21
"""A region begins on the border of a large page."""
_LOCK_WAIT_S = 5.0
"""Longest wait for the engine before. A killed one is gone after 14 to 25 ms."""
_POLL_S = 0.002
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which Python 3.11 does not name."""
_ENDS = "the KV cache ends with this engine, because its memory cannot be shared"


@dataclass(frozen=True, slots=True)
class _Region:
    """A tensor [planes, items, ...] in the memory, some of whose items are places."""

    content: memoryview
    address: int
    num_planes: int
    num_items: int
    item_bytes: int

    def parts(self, item: int, num_planes: int) -> Iterator[memoryview]:
        """The bytes of an item in the first planes."""
        for plane in range(num_planes):
            start = (plane * self.num_items + item) * self.item_bytes
            yield self.content[start : start + self.item_bytes]


@dataclass(frozen=True, slots=True)
class _Places:
    """Places `first` to `end - 1` are the items of a region from `first_item` on."""

    region: _Region
    first: int
    end: int
    first_item: int
    planes: tuple[int, ...]
    """Number of planes that a place of each group uses."""

    def all(self, place: int) -> Iterator[memoryview]:
        """The bytes of a place in all planes."""
        return self.region.parts(self.first_item + place - self.first, self.region.num_planes)


class PoolMemory:
    """The memory as one engine uses it: it gives tensors, and then it is the `Ledger` of their places."""

    def __init__(self, descriptor: int, num_places: int, layout: bytes) -> None:
        """`descriptor`: of the memory, locked by this process; it becomes this object's. `layout`: a digest of all that
        the meaning of the bytes depends on."""
        self._descriptor = descriptor
        self._layout = hashlib.blake2b(layout, digest_size=len(_NO_DIGEST))
        self._end = 0
        self._head = self._map(mmap.PAGESIZE + num_places * _RECORD.size)
        self._records = self._head[mmap.PAGESIZE :]
        self._regions: dict[int, _Region] = {}
        """By the address of the tensor."""
        self._places: list[_Places] = []
        self._epoch = self._first_epoch = 0
        self.is_usable = True
        """Whether all tensors lie here."""

    @classmethod
    def open(cls, path: str, num_places: int, layout: bytes) -> PoolMemory | None:
        """The memory that the server holds at this path. None, and a warning, if it cannot be used."""
        with opened(path, POOL_MEMORY) as descriptor:
            if descriptor is None:
                return None
            own = os.dup(descriptor)
        try:
            _lock(own)
            return cls(own, num_places, layout)
        except (OSError, ValueError) as error:
            os.close(own)
            logger.warning("%s: %s", _ENDS, error)
            return None

    # -- memory ------------------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with the content that an earlier engine left there, if it asked for the same tensors. If the memory
        cannot grow, the tensor lies elsewhere, and this memory is of no more use."""
        num_bytes = math.prod(shape) * dtype.itemsize
        self._layout.update(repr((tuple(shape), str(dtype))).encode())
        try:
            content = self._map(num_bytes)
        except (OSError, ValueError) as error:
            self.is_usable = False
            logger.warning("%s: %s", _ENDS, error)
            return torch.empty(tuple(shape), dtype=dtype)
        tensor = torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(tuple(shape))
        planes, items = shape[0], shape[1]
        self._regions[tensor.data_ptr()] = _Region(
            content, tensor.data_ptr(), planes, items, num_bytes // (planes * items)
        )
        return tensor

    def hold(self, tensor: Tensor, first: int, end: int, planes: Sequence[int] = (), first_item: int = 0) -> None:
        """Places `first` to `end - 1` have items of this tensor from `first_item` on. `planes`: the number of planes
        that each cache group uses; a place of another group uses all."""
        region = self._regions.get(tensor.data_ptr())
        if region is None:
            return
        self._places.append(_Places(region, first, end, first_item, tuple(planes)))

    def begin(self) -> None:
        """All tensors are there: keep what an earlier engine left, or begin anew if it laid the memory out in another
        way."""
        layout, first, last = _HEADER.unpack_from(self._head)
        self._epoch = last + 1
        self._first_epoch = first
        digest = self._layout.digest()
        if layout != digest:
            # In this order: records of the old layout never count with the new digest.
            self._first_epoch = self._epoch
            _HEADER.pack_into(self._head, 0, _NO_DIGEST, self._epoch, self._epoch)
        _HEADER.pack_into(self._head, 0, digest, self._first_epoch, self._epoch)
        left = [entry.place for entry in self.entries()]
        if left:
            threading.Thread(target=self._map_pages, args=(left,), name="inferd-kv-map", daemon=True).start()

    def _map_pages(self, places: Sequence[int]) -> None:
        """Have the system map the pages of these places, ascending, while the engine still starts. Otherwise the first
        reading of each does, which halves the speed of the checksums (8 in place of 19 GB/s, one core of an AMD EPYC
        Zen 4, 2026-12-01)."""
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for held in self._places:
            region = held.region
            items = [held.first_item + place - held.first for place in places if held.first <= place < held.end]
            for plane in range(region.num_planes):
                for first, end in _runs(items):
                    start = region.address + (plane * region.num_items + first) * region.item_bytes
                    page = start - start % mmap.PAGESIZE
                    if madvise(page, start + (end - first) * region.item_bytes - page, _POPULATE_READ):
                        return  # an older system

    @contextlib.contextmanager
    def preserved(self, block_id: int) -> Iterator[None]:
        """Give a block the bytes that it has now once more at the end. Warm-up steps write to it."""
        parts = [part for held in self._places if held.first <= block_id < held.end for part in held.all(block_id)]
        kept = [bytes(part) for part in parts]
        try:
            yield
        finally:
            for part, content in zip(parts, kept, strict=True):
                part[:] = content

    def _map(self, num_bytes: int) -> memoryview:
        """The next so many bytes of the memory."""
        start = self._end
        self._end = start + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if os.fstat(self._descriptor).st_size < self._end:
            os.ftruncate(self._descriptor, self._end)
        mapped = mmap.mmap(self._descriptor, self._end - start, offset=start)
        with contextlib.suppress(OSError, AttributeError):  # the system may have no large pages for it
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(mapped)[:num_bytes]

    # -- a tier below ------------------------------------------------------------------------------------------------

    @property
    def row_layout(self) -> str:
        """How the bytes of a place lie, as text that differs if they would mean something else."""
        return repr([(each.region.item_bytes, each.region.num_planes, each.planes) for each in self._places])

    def pieces(self, place: int, group: int) -> list[memoryview]:
        """The memory of a place, in the order of its checksum."""
        found: list[memoryview] = []
        for held in self._places:
            if held.first <= place < held.end:
                planes = held.planes[group] if group < len(held.planes) else held.region.num_planes
                found += held.region.parts(held.first_item + place - held.first, planes)
        return found

    def row_bytes(self, place: int, group: int) -> int:
        return sum(piece.nbytes for piece in self.pieces(place, group))

    def buffers(self, rows: Sequence[tuple[int, int] | None]) -> list[list[memoryview]]:
        return [[] if row is None else self.pieces(*row) for row in rows]

    def fetch(self, rows: Sequence[tuple[int, int] | None], buffers: Sequence[Sequence[memoryview]]) -> bool:
        """Nothing: these buffers are the places."""
        return False

    def store(self, rows: Sequence[tuple[int, int] | None], buffers: Sequence[Sequence[memoryview]]) -> None:
        """Nothing, as `fetch`."""

    # -- the ledger --------------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        for place, record in enumerate(_RECORD.iter_unpack(self._records)):
            epoch, _, use, group, depth, key = record
            if self._first_epoch <= epoch < self._epoch:
                yield Entry(place, group, key, depth, use)

    def is_sound(self, entry: Entry) -> bool:
        epoch, checksum, _, group, depth, key = _RECORD.unpack_from(self._records, entry.place * _RECORD.size)
        is_same = (group, depth, key) == (entry.group, entry.depth, entry.key)
        return is_same and self._first_epoch <= epoch <= self._epoch and checksum == self._checksum(entry)

    def write(self, entry: Entry) -> None:
        offset, checksum = entry.place * _RECORD.size, self._checksum(entry)
        _RECORD.pack_into(self._records, offset, self._epoch, checksum, entry.use, entry.group, entry.depth, entry.key)

    def touch(self, place: int, use: int) -> None:
        _NUMBER.pack_into(self._records, place * _RECORD.size + _USE_OFFSET, use)

    def erase(self, place: int) -> None:
        _NUMBER.pack_into(self._records, place * _RECORD.size, 0)

    def _checksum(self, entry: Entry) -> int:
        sum_ = xxhash.xxh3_64(_CHECKED.pack(entry.place, entry.group, entry.depth, entry.key))
        for piece in self.pieces(entry.place, entry.group):
            sum_.update(piece)
        return sum_.intdigest()


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as ranges (first, end)."""
    first = 0
    for index, number in enumerate(numbers):
        if index + 1 == len(numbers) or numbers[index + 1] != number + 1:
            yield numbers[first], number + 1
            first = index + 1


def _lock(descriptor: int) -> None:
    """Wait until no other process has the memory. Raises `OSError` if one keeps it."""
    until_s = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_POLL_S)
        else:
            return
