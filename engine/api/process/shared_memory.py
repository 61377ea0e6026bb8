"""Memory that server and engine process both map. The server allocates it and passes its descriptor to the engine.

It has no name and lies in no directory, so nothing is left behind, and a full disk does no harm. All of it is written
at once: if a page of a sparse file cannot be allocated at its first write, SIGBUS kills the writer.
"""

from __future__ import annotations

import mmap
import os
import tempfile


def allocate(num_bytes: int) -> int:
    """A file descriptor of `num_bytes` zeros. Raises `OSError`."""
    descriptor = create()
    try:
        fill(descriptor, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def create() -> int:
    """A file descriptor of no bytes yet. Raises `OSError`."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("inferd", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def fill(descriptor: int, num_bytes: int) -> None:
    """Write `num_bytes` zeros. Raises `OSError`."""
    with os.fdopen(descriptor, "wb", closefd=False) as whole:
        whole.write(bytes(num_bytes))


def open_map(descriptor: int) -> mmap.mmap:
    """A map of all of it, which stays valid when the descriptor is closed."""
    return mmap.mmap(descriptor, 0)
