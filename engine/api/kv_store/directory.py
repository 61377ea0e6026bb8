"""The directory of KV segments, as a server uses it: finds, reads, writes and evicts segments.

Several servers may share it, so files appear and vanish at any time. One thread of a process may write, and any number
may read meanwhile. A file appears under its name when it is whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from inferd.engine.api.kv_store import segment as files
from inferd.engine.api.kv_store.listing import (
    MARK,
    Entry,
    list_all,
    name_of,
    opened_file,
    opened_folder,
    part_of,
    remove,
    to_evict,
)
from inferd.engine.api.kv_store.opening import open_own, told
from inferd.engine.api.kv_store.segment import Blocks, Damaged, Missing, NotWritten, Pace, SegmentId

_T = TypeVar("_T")
_LISTINGS = 16
"""The directory is listed again after each such part of the quota that this process wrote. So files of other servers
count too, and all together exceed the quota by at most this part for each other server."""
_LEFT_OF_8 = 7
"""Eighths of the quota that an eviction leaves, so that the next one is some time away."""
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class KVDirectory:
    """An open directory of KV segments."""

    def __init__(self, path: Path, quota_bytes: int) -> None:
        """Open it, and make it if it is missing. Raises `StartError` if it cannot be used (`opening`).

        `quota_bytes`: most bytes of all files of ours in it, whichever server wrote them.
        """
        self._quota_bytes, self._used_bytes, self._unlisted_bytes = quota_bytes, 0, 0
        """`_unlisted_bytes`: bytes that this process wrote since it listed the directory."""
        with ExitStack() as opened:
            self._root = open_own(path)
            opened.callback(os.close, self._root)
            with told(path):
                self._lock = os.open(MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._root)
                opened.callback(os.close, self._lock)
                self._refresh(0)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def sizes(self, segment: SegmentId) -> tuple[int, ...]:
        """Number of bytes of each block, by the file's header. Raises `Missing`, and `Damaged`: then it is removed."""
        return self._opened_for(segment, lambda descriptor: files.sizes_of(descriptor, segment))

    def read(self, segment: SegmentId, blocks: Blocks, pace: Pace | None = None) -> None:
        """Fill the buffers of all blocks, and count the segment as used now.

        Raises `Missing`, `Stopped` by `pace`, and `Damaged`. Then the buffers may hold anything, and a damaged file is
        removed.
        """

        def fill(descriptor: int) -> None:
            files.read_from(descriptor, segment, blocks, pace)
            with suppress(OSError):
                os.utime(descriptor)

        self._opened_for(segment, fill)

    def writer_if_other(self, segment: SegmentId, blocks: Blocks) -> bytes | None:
        """The writer of a segment, if that was written from other bytes than these; None if from the same. Raises
        `Missing`, and `Damaged`: then it is removed."""

        def writer_if_other(descriptor: int) -> bytes | None:
            return None if files.compare(descriptor, segment, blocks) else files.writer_of(descriptor)

        return self._opened_for(segment, writer_if_other)

    def _opened_for(self, segment: SegmentId, use: Callable[[int], _T]) -> _T:
        """The result of `use` with a descriptor of the file. Raises `Missing` and `Damaged`, and removes what is
        damaged."""
        name = name_of(segment.key)
        try:
            with opened_folder(self._root, _folder_of(segment)) as folder, opened_file(folder, name) as descriptor:
                try:
                    return use(descriptor)
                except Damaged:
                    if _is_same_file(folder, name, descriptor):
                        os.unlink(name, dir_fd=folder)
                        self._used_bytes -= os.fstat(descriptor).st_size
                    raise
        except Damaged as error:
            raise Damaged(f"{name} is damaged: {error}") from error
        except OSError as error:
            raise Missing(f"{name} is not there: {error.strerror}") from error

    def write(self, segment: SegmentId, blocks: Blocks, writer: bytes, pace: Pace | None = None) -> bool:
        """Write a segment, and evict others if the quota asks for it. False if it is there already: then it only counts
        as used now.

        `writer`: 16 random bytes of this engine process. Raises `NotWritten`, and `Stopped` by `pace`. Nothing is left
        behind then. If the process is killed, a part is left, which some server removes an hour later. No byte is
        forced to the disk: a segment that a loss of power tears is found damaged.
        """
        try:
            return self._write(segment, blocks, writer, pace)
        except OSError as error:
            raise NotWritten(f"{name_of(segment.key)} was not written: {error.strerror}") from error

    def _write(self, segment: SegmentId, blocks: Blocks, writer: bytes, pace: Pace | None) -> bool:
        name, num_bytes = name_of(segment.key), files.file_bytes(blocks)
        with opened_folder(self._root, _folder_of(segment), may_make=True) as folder:
            if _renew(folder, name):
                return False
            self._make_room(num_bytes)
            part = part_of(name)
            descriptor = os.open(part, _WRITE_FLAGS, 0o600, dir_fd=folder)
            try:
                try:
                    files.write_to(descriptor, segment, writer, blocks, pace)
                finally:
                    os.close(descriptor)
                # A rename would replace whatever has the name by now.
                os.link(part, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
                self._used_bytes += num_bytes
                self._unlisted_bytes += num_bytes
            except FileExistsError:  # another server was faster
                _renew(folder, name)
                return False
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=folder)
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Evict segments until so many bytes may be written. Raises `NotWritten` and `OSError`."""
        if num_bytes > self._quota_bytes:
            raise NotWritten(f"a segment of {num_bytes} bytes is larger than the quota of {self._quota_bytes}")
        is_known = self._unlisted_bytes + num_bytes <= self._quota_bytes // _LISTINGS
        if is_known and self._used_bytes + num_bytes <= self._quota_bytes:
            return
        self._refresh(num_bytes)
        if self._used_bytes + num_bytes > self._quota_bytes:
            raise NotWritten(f"the quota of {self._quota_bytes} bytes is used up: others write or evict just now")

    def _refresh(self, num_bytes: int) -> None:
        """List the directory, and remove parts of killed processes. Unless another server evicts just now, also remove
        segments until `num_bytes` bytes may be written. Raises `OSError`."""
        is_evictor = self._take_lock()
        try:
            listing = list_all(self._root)
            self._used_bytes, self._unlisted_bytes = listing.num_bytes, 0
            for part in listing.parts:
                if part.is_left:
                    self._evict(part)
            if is_evictor and self._used_bytes + num_bytes > self._quota_bytes:
                excess_bytes = self._used_bytes + num_bytes - self._quota_bytes * _LEFT_OF_8 // 8
                for entry in to_evict(listing.segments, excess_bytes):
                    self._evict(entry)
        finally:
            if is_evictor:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _take_lock(self) -> bool:
        """Whether this process alone may evict now. A second evictor would remove twice as much."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _evict(self, entry: Entry) -> None:
        remove(self._root, entry)
        self._used_bytes -= entry.num_bytes

    def remove(self, segment: SegmentId) -> None:
        """Remove a segment, if it is there. Raises `OSError`."""
        with suppress(FileNotFoundError), opened_folder(self._root, _folder_of(segment)) as folder:
            if _is_file(folder, name_of(segment.key)):
                os.unlink(name_of(segment.key), dir_fd=folder)

    def drop_writers(self, writers: Collection[bytes]) -> int:
        """Remove every segment that these writers wrote, and return their number. It reads the header of each file. A
        segment that is written meanwhile stays. Raises `OSError` after it has tried all files."""
        num_files, failure = 0, None
        for entry in list_all(self._root).segments:
            try:
                with opened_folder(self._root, entry.folder) as folder, opened_file(folder, entry.name) as descriptor:
                    if files.writer_of(descriptor) in writers:
                        os.unlink(entry.name, dir_fd=folder)
                        self._used_bytes -= entry.num_bytes
                        num_files += 1
            except FileNotFoundError:
                continue  # evicted meanwhile
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
        return num_files

    def drop_model(self, fingerprint: bytes) -> int:
        """Remove every segment of this fingerprint, and return their number. Raises `OSError`."""
        listing = list_all(self._root)
        self._used_bytes, self._unlisted_bytes = listing.num_bytes, 0
        own = [entry for entry in listing.segments if entry.segment.fingerprint == fingerprint]
        for entry in own:
            self._evict(entry)
        return len(own)

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, as far as this process knows: without what others wrote since it last listed them."""
        return self._used_bytes


def _folder_of(segment: SegmentId) -> tuple[str, str]:
    return segment.fingerprint.hex(), segment.tenant.hex()


def _is_file(folder: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _is_same_file(folder: int, name: str, descriptor: int) -> bool:
    """Whether the open file still has this name."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _renew(folder: int, name: str) -> bool:
    """Count a file as used now; False if there is none. Raises `OSError`, also if something else has its name."""
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.EEXIST, "something else has its name")
        os.utime(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
