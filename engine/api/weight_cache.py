"""Packed weights in files of the user's cache: a later start maps them, and packs nothing.

An entry is named by a digest of all that its content follows from. Entries appear whole, and processes that share the
folder wait for the one that packs the same weights. A file ends with an index, which has a digest of itself and
checksums of all before it. All bytes are checked at each start. The folder is bounded: entries that nobody used for
longest go first.
This file knows no tensors.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from inferd.engine.api.files import cache_folder, refuse_others

logger = logging.getLogger("inferd.engine")

FOLDER = "weights"
MAX_BYTES = 64 * 2**30
"""Most bytes of all entries. A new one may take half of the disk's free space."""
_SUFFIX, _PART = ".weights", ".part"
_MAGIC = b"inferd weights 1"
_ALIGNMENT = 64
"""Each piece begins on a cache line."""
_PIECE_BYTES = 2**20
"""Bytes of a checksum. CRC-32 reads 3.5 GB/s on a core (AMD EPYC, 2026-11-29)."""
_WRITTEN_AT_ONCE = 2**24
_MAX_INDEX_BYTES = 2**28
_TAIL_BYTES = 8 + 32 + len(_MAGIC)
_WAIT_S = 0.1
_LONGEST_WAIT_S = 240.0
"""Less than half of what an engine may sleep for while it loads, because a rank may wait for another that waits."""
_ROOTS = ("engine", "kernels")


class Piece(msgspec.Struct, frozen=True):
    """One tensor in an entry."""

    dtype: str
    shape: tuple[int, ...]


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of the model."""

    name: str
    piece: int | None
    """The piece with its values; None: nothing but packed pieces follow from them."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """A description of what an entry holds."""

    label: str
    """The model, settings and version, for people. Of entries with one label, the newest stays: the others are of other
    files, or of other code."""
    pieces: tuple[Piece, ...]
    num_packed: int
    """The first so many pieces are packed weights, in the order in which layers asked for them."""
    parameters: tuple[Parameter, ...]
    """In the order in which they were complete."""


class _Index(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a file, behind the pieces. A length, a digest of this and `_MAGIC` follow it."""

    contents: Contents
    offsets: tuple[int, ...]
    """First byte of each piece."""
    num_bytes: int
    """Number of bytes of all pieces."""
    checksums: tuple[int, ...]
    """CRC-32 of each MiB of them."""


class DamagedError(OSError):
    """An entry does not hold what was written."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """An entry in memory. Its pages are those of the system's file cache, shared with other processes."""

    contents: Contents
    pages: mmap.mmap
    offsets: tuple[int, ...]
    """First byte of each piece in `pages`."""
    num_bytes: int


def name_of(parts: Sequence[str]) -> str:
    """The name of an entry whose content follows from `parts` and from the source code of the engine and kernels."""
    made = hashlib.sha256(_digest_of_sources().encode())
    for part in parts:
        made.update(part.encode() + b"\0")
    return made.hexdigest()[:40]


@cache
def _digest_of_sources() -> str:
    made, root = hashlib.sha256(), Path(__file__).resolve().parents[2]
    for folder in _ROOTS:
        for file in sorted((root / folder).rglob("*.py")):
            made.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return made.hexdigest()


class Entry:
    """The place of one model's packed weights in the folder, for one process."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._folder = cache_folder(FOLDER)
        self._path, self._part = self._folder / f"{name}{_SUFFIX}", self._folder / f"{name}{_PART}"
        self._num_threads = num_threads
        self._lock: int | None = None

    def open(self, num_bytes: int = 0, *, may_wait: bool = True) -> Mapped | None:
        """The entry, whole and checked. None if there is none: then this process may `write` it, and others that want
        it wait. Without `may_wait` it is None too if another process writes it now. `num_bytes`: about those that a new
        one would have. Raises `OSError` if the folder cannot be used, or has no room for so many."""
        refuse_others(self._folder)
        found = self._mapped()
        if found is None and self._take_lock(num_bytes, may_wait):
            found = self._mapped()  # another process may have written it since
            if found is not None:
                self.release()
        return found

    @property
    def may_write(self) -> bool:
        return self._lock is not None

    def _take_lock(self, num_bytes: int, may_wait: bool) -> bool:
        """Whether this process alone may write the entry now. Waits for another process that does. The lock ends with
        the process."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_others(self._folder)
        _check_room(self._folder, num_bytes)
        deadline_s, has_told = time.monotonic() + _LONGEST_WAIT_S, False
        while True:
            descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                if not may_wait or time.monotonic() > deadline_s or self._path.exists():
                    return self._path.exists()
                if not has_told:
                    logger.info("another process packs the same weights: waiting until they can be shared")
                    has_told = True
                time.sleep(_WAIT_S)
                continue
            except OSError:  # a file system without locks: two processes may write, each its own file
                os.close(descriptor)
                raise
            if _is_same_file(self._part, descriptor):
                self._lock = descriptor
                return True
            os.close(descriptor)  # it was renamed or removed meanwhile

    def _mapped(self) -> Mapped | None:
        """The entry; None if there is none or if it is damaged. A damaged one is removed."""
        try:
            with _opened(self._path) as descriptor:
                found = _read(descriptor, self._num_threads)
                with suppress(OSError):
                    os.utime(descriptor)  # entries that nobody uses go first
                return found
        except FileNotFoundError:
            return None
        except DamagedError as error:
            logger.warning("%s is damaged (%s): the weights are packed anew", self._path, error)
            self.remove()
            return None

    def remove(self) -> None:
        """Remove an entry that cannot be used."""
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let another process write the entry."""
        if self._lock is not None:
            with suppress(OSError):
                if _is_same_file(self._part, self._lock):
                    self._part.unlink()
            os.close(self._lock)
            self._lock = None

    def write(self, contents: Contents, pieces: Sequence[memoryview]) -> int:
        """Write the entry, and return its bytes. Raises `OSError`, and leaves nothing behind then."""
        assert self._lock is not None
        try:
            _check_room(self._folder, sum(piece.nbytes for piece in pieces))
            num_bytes = _write(self._lock, contents, pieces, self._num_threads)
            if not _is_same_file(self._part, self._lock):
                raise OSError(errno.ENOENT, "the file was removed while it was written", str(self._part))
            os.rename(self._part, self._path)
        finally:
            self.release()
        for other in files_in(self._folder):
            is_entry = other.path.suffix == _SUFFIX and other.path != self._path
            if is_entry and label_of(other.path) in (contents.label, ""):
                other.path.unlink(missing_ok=True)
        _remove_oldest(self._folder)
        return num_bytes


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _index_of(descriptor: int) -> _Index:
    """Raises `DamagedError`."""
    end = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, _TAIL_BYTES, max(end - _TAIL_BYTES, 0))
    size = int.from_bytes(tail[:8], "little")
    if tail[-len(_MAGIC) :] != _MAGIC or size > min(end - _TAIL_BYTES, _MAX_INDEX_BYTES):
        raise DamagedError("its end is missing")
    encoded = os.pread(descriptor, size, end - _TAIL_BYTES - size)
    if hashlib.sha256(encoded).digest() != tail[8 : -len(_MAGIC)]:
        raise DamagedError("its index is wrong")
    try:
        return msgspec.msgpack.decode(encoded, type=_Index)
    except msgspec.MsgspecError as error:
        raise DamagedError(f"its index is of another version: {error}") from error


def _read(descriptor: int, num_threads: int) -> Mapped:
    """Raises `DamagedError`."""
    index = _index_of(descriptor)
    if _checksums(descriptor, index.num_bytes, num_threads) != index.checksums:
        raise DamagedError("a checksum is wrong")
    # torch wants memory that it may write to. A page would be copied if it were written to, and none is. (To populate
    # such memory at once would copy all pages.)
    pages = mmap.mmap(descriptor, index.num_bytes, access=mmap.ACCESS_COPY)
    return Mapped(index.contents, pages, index.offsets, index.num_bytes)


def _write(descriptor: int, contents: Contents, pieces: Sequence[memoryview], num_threads: int) -> int:
    """Returns the bytes written. Raises `OSError`."""
    os.ftruncate(descriptor, 0)
    offsets, end = list[int](), 0
    for piece in pieces:
        offsets.append(end)
        _write_all(descriptor, piece, end)
        end = -(-(end + piece.nbytes) // _ALIGNMENT) * _ALIGNMENT
    os.ftruncate(descriptor, end)
    checksums = _checksums(descriptor, end, num_threads)
    index = _Index(contents=contents, offsets=tuple(offsets), num_bytes=end, checksums=checksums)
    encoded = msgspec.msgpack.encode(index)
    tail = len(encoded).to_bytes(8, "little") + hashlib.sha256(encoded).digest() + _MAGIC
    _write_all(descriptor, memoryview(encoded + tail), end)
    return end + len(encoded) + len(tail)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data[:_WRITTEN_AT_ONCE], offset)
        data, offset = data[written:], offset + written


def _checksums(descriptor: int, num_bytes: int, num_threads: int) -> tuple[int, ...]:
    """CRC-32 of each MiB. Threads compute it beside each other, because the system and zlib let other threads run. The
    file is read and not mapped: an unreadable page of a mapped file would end the process. Raises `DamagedError`."""
    own = threading.local()

    def checksum(at: int) -> int:
        if not hasattr(own, "piece"):
            own.piece = memoryview(bytearray(_PIECE_BYTES))
        size = min(_PIECE_BYTES, num_bytes - at)
        if os.preadv(descriptor, [own.piece[:size]], at) != size:
            raise DamagedError("it was cut")
        return zlib.crc32(own.piece[:size])

    try:
        with ThreadPoolExecutor(num_threads) as pool:
            return tuple(pool.map(checksum, range(0, num_bytes, _PIECE_BYTES)))
    except OSError as error:
        raise error if isinstance(error, DamagedError) else DamagedError(f"it cannot be read: {error}") from error


def _check_room(folder: Path, num_bytes: int) -> None:
    """Raises `OSError` if an entry of so many bytes is too large for the disk or the folder."""
    free = shutil.disk_usage(folder).free
    if num_bytes > min(free // 2, MAX_BYTES):
        text = f"{num_bytes / 2**30:.1f} GiB are more than half of the {free / 2**30:.1f} GiB that are free there"
        raise OSError(errno.ENOSPC, text, str(folder))


def _remove_oldest(folder: Path) -> None:
    """Remove the entries that nobody used for longest, until the folder is within its bound. Processes that have mapped
    one keep it."""
    num_bytes = 0
    for used in files_in(folder):
        num_bytes += used.num_bytes
        if num_bytes > MAX_BYTES:
            used.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Used:
    """A file of the folder, for people."""

    path: Path
    num_bytes: int
    used_s: float
    """When it was last used, in seconds since 1970."""


def files_in(folder: Path) -> list[Used]:
    """The files of a folder of the cache, the latest used first. Files of writers that were killed are among them."""
    found = []
    with suppress(FileNotFoundError):
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # another process has removed it
                about = path.lstat()
                if stat.S_ISREG(about.st_mode):
                    found.append(Used(path, about.st_size, about.st_mtime))
    return sorted(found, key=lambda used: used.used_s, reverse=True)


def label_of(path: Path) -> str:
    """The label of an entry; empty if it is damaged or no entry. Reads its index alone."""
    try:
        with _opened(path) as descriptor:
            return _index_of(descriptor).contents.label
    except OSError:
        return ""
