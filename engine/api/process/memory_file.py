"""A file in memory that the server holds open for its engines, so that it outlives each of them.

It has no name: other processes open it by the path of the server's descriptor. It is gone once nobody has it open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

POOL_MEMORY = "inferd-pool"
"""Name of the files in which KV pools lie."""


class MemoryFile:
    """The server's descriptor of one, which is closed when nothing refers to this object."""

    def __init__(self, name: str, flags: int = 0) -> None:
        """`flags`: of memfd_create(2). On a system without such files, or without a free descriptor, there is none."""
        self._descriptor: int | None = None
        self.path = ""
        """Other processes open it by this path; empty if there is none."""
        with contextlib.suppress(AttributeError, OSError):
            self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC | flags)
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextlib.contextmanager
def opened(path: str, name: str) -> Iterator[int | None]:
    """A descriptor of the file with this name; None if there is none any more, or the system lends none. After the
    server closed its own, the path may lead to another file."""
    # The kernel says that a descriptor of such a file leads to this.
    target, descriptor = f"/memfd:{name} (deleted)", None
    try:
        with contextlib.suppress(OSError):
            if path and os.readlink(path) == target:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                if os.readlink(f"/proc/self/fd/{descriptor}") != target:
                    os.close(descriptor)
                    descriptor = None
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)
