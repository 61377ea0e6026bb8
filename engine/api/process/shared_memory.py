"""Memory that server and engine process both map: one makes it and passes its descriptor on when it starts the other.

It has no name and lies in no directory, so that nothing is left behind and no full disk can take it away. It is
allocated whole: if a page of a sparse file cannot be had when it is first written, SIGBUS ends the writer.
"""

from __future__ import annotations

import mmap
import os
import tempfile


def allocate(num_bytes: int) -> int:
    """A descriptor of so many zeros. Raises `OSError`."""
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
    """All of it. Outlives the descriptor."""
    return mmap.mmap(descriptor, 0)
