"""Everything that the directory of KV segments holds, by names, sizes and times. No file is opened.

    DIRECTORY/<fingerprint>/<tenant>/<key>.kv          a segment
    DIRECTORY/<fingerprint>/<tenant>/<key>.kv.*.part   one that a process writes, or that a killed process left

Fingerprint, tenant and key are hexadecimal. Whatever has another name, or is no regular file, is foreign: it is
counted, and neither read nor removed. No symbolic link is followed.
"""

from __future__ import annotations

import errno
import heapq
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from inferd.engine.api.kv_store.segment import FINGERPRINT_BYTES, KEY_BYTES, TENANT_BYTES, SegmentId

MARK = "inferd-kv.json"
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Without O_NONBLOCK, opening a FIFO waits until another process writes to it."""
LEFT_AFTER_S = 3600.0
"""Seconds without a write after which a part is one of a killed process. A segment is written within some seconds."""
_SUFFIX = ".kv"
_FINGERPRINT = re.compile(f"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}")
_TENANT = re.compile(f"[0-9a-f]{{{2 * TENANT_BYTES}}}")
_SEGMENT = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}\.kv")
_PART = re.compile(r"(inferd-kv\.json|[0-9a-f]+\.kv)\.[0-9a-f]{16}\.part")


class Entry(NamedTuple):
    """One file of ours."""

    folder: tuple[str, ...]
    """Its place: fingerprint and tenant, in hexadecimal; empty for a part of the mark."""
    name: str
    num_bytes: int
    used_ns: int
    """Time of its last use, in nanoseconds since 1970."""
    is_left: bool = False
    """Whether it is a part that nobody writes any more."""

    @property
    def path(self) -> str:
        """The path in the directory."""
        return "/".join((*self.folder, self.name))

    @property
    def segment(self) -> SegmentId:
        fingerprint, tenant = map(bytes.fromhex, self.folder)
        return SegmentId(fingerprint, tenant, bytes.fromhex(self.name.removesuffix(_SUFFIX)))


@dataclass(frozen=True, slots=True)
class Listing:
    """The files and folders of the directory."""

    segments: list[Entry] = field(default_factory=list)
    parts: list[Entry] = field(default_factory=list)
    folders: list[tuple[str, ...]] = field(default_factory=list)
    """Folders of ours: fingerprint, or fingerprint and tenant."""
    foreign: list[str] = field(default_factory=list)
    """Paths in the directory. What a foreign folder holds is not listed."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all files of ours."""
        return sum(entry.num_bytes for entry in (*self.segments, *self.parts))


def name_of(key: bytes) -> str:
    return f"{key.hex()}{_SUFFIX}"


def part_of(name: str) -> str:
    """A name of its own for a file that is to become `name`."""
    return f"{name}.{os.urandom(8).hex()}.part"


def is_part(name: str) -> bool:
    return _PART.fullmatch(name) is not None


@contextmanager
def opened_folder(root: int, folder: Iterable[str], *, may_make: bool = False) -> Iterator[int]:
    """Descriptor of a folder inside the directory. Raises `OSError`, also if a link stands in its place."""
    descriptor = os.open(".", FOLDER_FLAGS, dir_fd=root)
    try:
        for name in folder:
            if may_make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=descriptor)
            above = descriptor
            try:
                descriptor = os.open(name, FOLDER_FLAGS, dir_fd=above)
            finally:
                if descriptor != above:
                    os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_file(folder: int, name: str) -> Iterator[int]:
    """Descriptor of a regular file, to read it. Raises `OSError`, also for anything else."""
    descriptor = os.open(name, _READ_FLAGS, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "something else has its name")
        yield descriptor
    finally:
        os.close(descriptor)


def list_all(root: int) -> Listing:
    """List the directory of this descriptor. Other servers may change it meanwhile. Raises `OSError`."""
    found = Listing()
    for fingerprint in _within(root, (), _FINGERPRINT, found):
        for tenant in _within(root, (fingerprint,), _TENANT, found):
            _within(root, (fingerprint, tenant), None, found)
    return found


def _within(root: int, folder: tuple[str, ...], folders: re.Pattern[str] | None, found: Listing) -> list[str]:
    """Add what lies in one folder to `found`, and return the names of the folders of ours in it."""
    below = []
    with (
        suppress(FileNotFoundError, NotADirectoryError),  # another server removed the folder
        # A descriptor of its own: duplicates share the position in the folder, and several threads may list it.
        opened_folder(root, folder) as descriptor,
        os.scandir(descriptor) as entries,
    ):
        for entry in entries:
            with suppress(FileNotFoundError):  # it was removed meanwhile
                about, name = entry.stat(follow_symlinks=False), entry.name
                is_file = stat.S_ISREG(about.st_mode)
                if is_file and folders is None and _SEGMENT.fullmatch(name):
                    found.segments.append(Entry(folder, name, about.st_size, about.st_mtime_ns))
                elif is_file and len(folder) != 1 and is_part(name):
                    found.parts.append(_part(folder, name, about))
                elif folders is not None and folders.fullmatch(name) and stat.S_ISDIR(about.st_mode):
                    below.append(name)
                    found.folders.append((*folder, name))
                elif not (is_file and not folder and name == MARK):
                    found.foreign.append("/".join((*folder, name)))
    return below


def _part(folder: tuple[str, ...], name: str, about: os.stat_result) -> Entry:
    # A part that has a second name is complete: its writer was killed before it removed this name, or is about to.
    is_complete = about.st_nlink > 1
    is_left = is_complete or about.st_mtime < time.time() - LEFT_AFTER_S
    return Entry(folder, name, 0 if is_complete else about.st_size, about.st_mtime_ns, is_left)


def remove(root: int, entry: Entry) -> None:
    """Remove a file of ours, if it is still there. Raises `OSError`."""
    with suppress(FileNotFoundError), opened_folder(root, entry.folder) as folder:
        os.unlink(entry.name, dir_fd=folder)


def to_evict(segments: Iterable[Entry], num_bytes: int) -> Iterator[Entry]:
    """Segments of at least `num_bytes` bytes together, or all. The least recently used one of the tenant that has the
    most bytes goes first, so that no tenant can push all others out."""
    of_tenant: dict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(segments, key=lambda entry: entry.used_ns, reverse=True):
        of_tenant[entry.folder[-1]].append(entry)
    heap = [(-sum(entry.num_bytes for entry in entries), tenant) for tenant, entries in of_tenant.items()]
    heapq.heapify(heap)
    while num_bytes > 0 and heap:
        negative, tenant = heap[0]
        entry = of_tenant[tenant].pop()
        if of_tenant[tenant]:
            heapq.heapreplace(heap, (negative + entry.num_bytes, tenant))
        else:
            heapq.heappop(heap)
        num_bytes -= entry.num_bytes
        yield entry
