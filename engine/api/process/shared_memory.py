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
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("inferd", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as whole:
            whole.write(bytes(num_bytes))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_map(descriptor: int) -> mmap.mmap:
    """A map of all of it, which stays valid when the descriptor is closed."""
    return mmap.mmap(descriptor, 0)
