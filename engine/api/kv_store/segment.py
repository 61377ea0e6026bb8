"""The file of one segment: the keys and values of some blocks that follow each other in a chain of tokens.

All numbers are little-endian:

    magic 8, format 4, number of blocks 4, fingerprint 32, tenant 16, key 32, writer 16
    for each block: number of bytes 8, xxh3_128 of its bytes 16
    xxh3_128 of all before 16
    the bytes of each block

The header's checksum covers the identity and the checksums of the blocks. So a file that was exchanged, renamed, cut,
extended or changed in any bit is found. This file knows descriptors, and neither names nor the directory.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from xxhash import xxh3_128, xxh3_128_digest

from inferd.engine.api.errors import InferdError

FORMAT = 1
"""Version of the files and of the directory."""
MAX_BLOCKS = 256
FINGERPRINT_BYTES, TENANT_BYTES, KEY_BYTES, WRITER_BYTES = 32, 16, 32, 16
_MAGIC = b"inferdkv"
_FIXED = struct.Struct(f"<8sII{FINGERPRINT_BYTES}s{TENANT_BYTES}s{KEY_BYTES}s{WRITER_BYTES}s")
_ROW = struct.Struct("<Q16s")
_DIGEST_BYTES = 16
_MOST_PIECES = os.sysconf("SC_IOV_MAX")
_MOST_BYTES = 4 * 2**20
"""Most bytes of one call of the system, so that the caller can bound the bandwidth and stop soon."""

Blocks = Sequence[Sequence[memoryview]]
"""For each block the pieces of memory, each contiguous, that its bytes lie in. Their order is the file's."""
Pace = Callable[[int], bool]
"""The caller's word before some bytes are read or written; its argument is their number. It may sleep. False stops. The
last call of a write has 0: all bytes were copied, and False drops them."""


class KVStoreError(InferdError):
    """A segment was not read or not written."""


class Missing(KVStoreError):
    """No such segment is there, or it cannot be opened; the message says why."""


class Damaged(KVStoreError):
    """A file does not hold what was written; the message says what is wrong."""


class NotWritten(KVStoreError):
    """A segment was not written, and nothing of it is left: the disk is full, or the quota, or there is an I/O
    error."""


class Stopped(KVStoreError):
    """The caller's `Pace` said stop. Nothing was written, and buffers hold nothing of use."""


@dataclass(frozen=True, slots=True)
class SegmentId:
    """Identity of a segment: all that its bytes depend on. The caller computes each part as a strong hash."""

    fingerprint: bytes
    """32 bytes: the model and how its keys and values are computed and laid out."""
    tenant: bytes
    """16 bytes."""
    key: bytes
    """32 bytes: the chain of tokens to the last block, with the tenant's salt."""

    def __post_init__(self) -> None:
        given = (len(self.fingerprint), len(self.tenant), len(self.key))
        assert given == (FINGERPRINT_BYTES, TENANT_BYTES, KEY_BYTES), given


@dataclass(frozen=True, slots=True)
class _Row:
    """One block."""

    num_bytes: int
    checksum: bytes


def file_bytes(blocks: Blocks) -> int:
    """Number of bytes of the file of these blocks."""
    return _header_bytes(len(blocks)) + sum(piece.nbytes for block in blocks for piece in block)


def write_to(descriptor: int, segment: SegmentId, writer: bytes, blocks: Blocks, pace: Pace | None = None) -> None:
    """Write an empty file. Raises `Stopped` and `OSError`.

    No byte is forced to the disk: the checksums find what a loss of power tears. A checksum is of the bytes as they
    were in memory just before the call that wrote them.
    """
    assert 0 < len(blocks) <= MAX_BLOCKS and len(writer) == WRITER_BYTES
    offset, rows = _header_bytes(len(blocks)), []
    for block in blocks:
        checksum, num_bytes = xxh3_128(), 0
        for batch in _batches(block):
            size = sum(piece.nbytes for piece in batch)
            _ask(pace, size)
            for piece in batch:
                checksum.update(piece)
            _write_all(descriptor, batch, offset + num_bytes)
            num_bytes += size
        offset += num_bytes
        rows.append(_ROW.pack(num_bytes, checksum.digest()))
    _ask(pace, 0)
    fixed = _FIXED.pack(_MAGIC, FORMAT, len(blocks), segment.fingerprint, segment.tenant, segment.key, writer)
    covered = fixed + b"".join(rows)
    _write_all(descriptor, [memoryview(covered + xxh3_128_digest(covered))], 0)


def read_from(descriptor: int, segment: SegmentId, blocks: Blocks, pace: Pace | None = None) -> None:
    """Fill `blocks`. Raises `Damaged`, `Stopped` and `OSError`; then the buffers may hold anything."""
    offset, rows = _header_bytes(len(blocks)), _rows_of(descriptor, segment)
    found = [row.num_bytes for row in rows]
    asked = [sum(piece.nbytes for piece in block) for block in blocks]
    if found != asked:
        raise Damaged(f"it has {len(found)} blocks of {sum(found)} bytes, and not {len(asked)} of {sum(asked)}")
    for number, (block, row) in enumerate(zip(blocks, rows, strict=True)):
        checksum = xxh3_128()
        for batch in _batches(block):
            size = sum(piece.nbytes for piece in batch)
            _ask(pace, size)
            _read_all(descriptor, batch, offset)
            for piece in batch:
                checksum.update(piece)
            offset += size
        _compare(checksum.digest(), row, number)


def sizes_of(descriptor: int, segment: SegmentId) -> tuple[int, ...]:
    """Number of bytes of each block, by the header alone. Raises `Damaged` and `OSError`."""
    return tuple(row.num_bytes for row in _rows_of(descriptor, segment))


def compare(descriptor: int, segment: SegmentId, blocks: Blocks) -> bool:
    """Whether these bytes are those that the file was written from, by the checksums of its header. A block without
    bytes, here or there, is not compared. Raises `Damaged` and `OSError`."""
    rows = _rows_of(descriptor, segment)
    if len(rows) != len(blocks):
        raise Damaged(f"it has {len(rows)} blocks, and not {len(blocks)}")
    for block, row in zip(blocks, rows, strict=True):
        num_bytes = sum(piece.nbytes for piece in block)
        if not num_bytes or not row.num_bytes:
            continue
        checksum = xxh3_128()
        for piece in block:
            checksum.update(piece)
        if (num_bytes, checksum.digest()) != (row.num_bytes, row.checksum):
            return False
    return True


def check(descriptor: int, segment: SegmentId) -> None:
    """Read the whole file and keep nothing. Raises `Damaged` and `OSError`."""
    rows = _rows_of(descriptor, segment)
    offset, scratch = _header_bytes(len(rows)), memoryview(bytearray(_MOST_BYTES))
    for number, row in enumerate(rows):
        checksum, end = xxh3_128(), offset + row.num_bytes
        while offset < end:
            piece = scratch[: end - offset]
            _read_all(descriptor, [piece], offset)
            checksum.update(piece)
            offset += piece.nbytes
        _compare(checksum.digest(), row, number)


def writer_of(descriptor: int) -> bytes | None:
    """The id of the engine process that wrote the file; None if the file is too short to say. Raises `OSError`."""
    fixed = os.pread(descriptor, _FIXED.size, 0)
    return fixed[-WRITER_BYTES:] if len(fixed) == _FIXED.size else None


def _header_bytes(num_blocks: int) -> int:
    return _FIXED.size + num_blocks * _ROW.size + _DIGEST_BYTES


def _rows_of(descriptor: int, segment: SegmentId) -> tuple[_Row, ...]:
    """The blocks, by the header of a sound file of this identity. Raises `Damaged` and `OSError`."""
    with _unreadable_is_damaged():
        data, end = os.pread(descriptor, _header_bytes(MAX_BLOCKS), 0), os.fstat(descriptor).st_size
    if len(data) < _FIXED.size:
        raise Damaged(f"it has {end} bytes, which is too short")
    magic, version, num_blocks, fingerprint, tenant, key, _ = _FIXED.unpack_from(data)
    if magic != _MAGIC or version != FORMAT:
        raise Damaged(f"it begins with {magic!r} and format {version}, and not with {_MAGIC!r} and {FORMAT}")
    size = _header_bytes(num_blocks)
    if xxh3_128_digest(data[: size - _DIGEST_BYTES]) != data[size - _DIGEST_BYTES : size]:
        raise Damaged("the checksum of its header is wrong")
    if SegmentId(fingerprint, tenant, key) != segment:
        raise Damaged(f"it is the segment {key.hex()} of tenant {tenant.hex()} and fingerprint {fingerprint.hex()}")
    rows = tuple(_Row(*_ROW.unpack_from(data, _FIXED.size + number * _ROW.size)) for number in range(num_blocks))
    expected = size + sum(row.num_bytes for row in rows)
    if end != expected:
        raise Damaged(f"it has {end} bytes, and not {expected}")
    return rows


@contextmanager
def _unreadable_is_damaged() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise Damaged(f"it cannot be read ({error.strerror})") from error


def _compare(checksum: bytes, row: _Row, number: int) -> None:
    if checksum != row.checksum:
        raise Damaged(f"the checksum of block {number} is wrong")


def _ask(pace: Pace | None, num_bytes: int) -> None:
    if pace is not None and not pace(num_bytes):
        raise Stopped("the caller stopped it")


def _batches(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The pieces in order, as many as one call of the system takes. A large piece is divided."""
    batch, size = list[memoryview](), 0
    for whole in pieces:
        piece = whole.cast("B")
        for at in range(0, piece.nbytes, _MOST_BYTES):
            part = piece[at : at + _MOST_BYTES]
            if len(batch) == _MOST_PIECES or size + part.nbytes > _MOST_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(part)
            size += part.nbytes
    if batch:
        yield batch


def _write_all(descriptor: int, pieces: list[memoryview], offset: int) -> None:
    while pieces:
        done = os.pwritev(descriptor, pieces, offset)
        if not done:
            raise OSError(errno.EIO, "nothing was written")
        pieces, offset = _behind(pieces, done), offset + done


def _read_all(descriptor: int, pieces: list[memoryview], offset: int) -> None:
    while pieces:
        with _unreadable_is_damaged():
            done = os.preadv(descriptor, pieces, offset)
        if not done:
            raise Damaged("it was cut while it was read")
        pieces, offset = _behind(pieces, done), offset + done


def _behind(pieces: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The pieces without their first bytes."""
    for number, piece in enumerate(pieces):
        if num_bytes < piece.nbytes:
            return [piece[num_bytes:], *pieces[number + 1 :]]
        num_bytes -= piece.nbytes
    return []
