"""A file in memory that several processes read, and that the first one to need it writes.

The server keeps it open, so that it outlives every engine (`memory_file`). The process that gets the lock writes it and
seals it (memfd_create(2), F_ADD_SEALS in fcntl(2)): from then on nobody can change it. If the writer dies, the kernel
frees its lock, and the next process writes it anew.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable

from inferd.engine.api.process.memory_file import MemoryFile, opened

_NAME = "inferd-once"
_POLL_S = 0.02
_MAX_WAIT_S = 30.0
"""Longest wait for the process that writes. On a busy machine a vocabulary of 262,000 tokens takes longer, but the
process that checks grammars has 60 s to start (`server/structured/checker`)."""


class WrittenOnce(MemoryFile):
    """The server's descriptor of one. On a system without such files each process makes the content for itself."""

    def __init__(self) -> None:
        super().__init__(_NAME, getattr(os, "MFD_ALLOW_SEALING", 0))


def is_written(path: str) -> bool:
    """Whether all of it was written."""
    with opened(path, _NAME) as descriptor:
        return descriptor is not None and _is_sealed(descriptor)


def content_of(path: str, make: Callable[[], bytes]) -> memoryview:
    """The content, which `make` makes if nobody has written it. Without such a file, or if another process takes long
    to write it, the result is this process's own."""
    with opened(path, _NAME) as descriptor:
        if descriptor is None or not _write(descriptor, make):
            return memoryview(make())
        # Not through `descriptor`: older kernels map a sealed file only if it is open for reading alone.
        reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(reading, 0, prot=mmap.PROT_READ))
    finally:
        os.close(reading)


def _write(descriptor: int, make: Callable[[], bytes]) -> bool:
    """Write what `make` makes, unless another process does. False if that takes too long, or there is no memory."""
    until_s = time.monotonic() + _MAX_WAIT_S
    while not _is_sealed(descriptor):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
            continue
        # Closing the descriptor frees the lock. Another process may have written everything before this one got it.
        return _is_sealed(descriptor) or _fill(descriptor, make())
    return True


def _fill(descriptor: int, content: bytes) -> bool:
    try:
        os.ftruncate(descriptor, 0)
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        return False
    return True


def _is_sealed(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)
