"""Segments for tests of the directory of KV segments: identities, contents and their files."""

from __future__ import annotations

import hashlib
import os
import random
import stat
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from inferd.engine.api.kv_store import upkeep
from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.engine.api.kv_store.listing import Listing, list_all, name_of, opened_folder
from inferd.engine.api.kv_store.opening import existing
from inferd.engine.api.kv_store.segment import SegmentId

WRITER = b"some engine here"
PIECES = ((700, 1, 300), (1001,), (64, 64, 64, 0, 64))
"""Bytes of each piece of each block of a small segment."""
NUM_BYTES = sum(map(sum, PIECES))
FILE_BYTES = 112 + 16 + 24 * len(PIECES) + NUM_BYTES
PLENTY = 2**30


def segment(number: int = 0, tenant: int = 0, model: int = 0) -> SegmentId:
    key = hashlib.sha256(b"key %d" % number).digest()
    return SegmentId(hashlib.sha256(b"model %d" % model).digest(), hashlib.md5(b"%d" % tenant).digest(), key)


def content_of(some: SegmentId, num_bytes: int = NUM_BYTES) -> bytes:
    return random.Random(some.key + some.tenant + some.fingerprint).randbytes(num_bytes)


def blocks_of(content: bytes | bytearray, sizes: Sequence[Sequence[int]] = PIECES) -> list[list[memoryview]]:
    """Views of a memory, by block and piece."""
    views, at = list[list[memoryview]](), 0
    for block in sizes:
        views.append([])
        for size in block:
            views[-1].append(memoryview(content)[at : at + size])
            at += size
    return views


def write(directory: KVDirectory, some: SegmentId, writer: bytes = WRITER) -> bool:
    return directory.write(some, blocks_of(content_of(some)), writer)


def read(directory: KVDirectory, some: SegmentId, sizes: Sequence[Sequence[int]] = PIECES) -> bytes:
    """The content of a segment. Raises what `KVDirectory.read` raises."""
    memory = bytearray(b"\xa5" * sum(map(sum, sizes)))
    directory.read(some, blocks_of(memory, sizes))
    return bytes(memory)


def is_there(directory: KVDirectory, some: SegmentId) -> bool:
    """Whether its file is there. No byte is read, so it may turn out damaged."""
    try:
        with opened_folder(directory._root, (some.fingerprint.hex(), some.tenant.hex())) as folder:
            return stat.S_ISREG(os.lstat(name_of(some.key), dir_fd=folder).st_mode)
    except OSError:
        return False


def path_of(root: Path, some: SegmentId) -> Path:
    return root / some.fingerprint.hex() / some.tenant.hex() / f"{some.key.hex()}.kv"


def use_at(root: Path, some: SegmentId, time_s: float) -> None:
    os.utime(path_of(root, some), (time_s, time_s))


def listing_of(root: Path) -> Listing:
    with existing(root) as descriptor:
        return list_all(descriptor)


def verified(root: Path) -> upkeep.Verdict:
    with existing(root) as descriptor:
        return upkeep.verify(descriptor, list_all(descriptor), lambda _: None)


def forked(run: Callable[[], object]) -> int:
    """The process id of a fork that runs this and ends."""
    child = os.fork()
    if not child:
        try:
            run()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def ended(child: int) -> int:
    """The exit code of a fork, or the negative signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
