"""Reads files that an operator names, but regular files only.

Opening a FIFO waits until another process writes to it, and reading a terminal or a device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a whole regular file. Raises `OSError`, also for another kind of file and for more than `max_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes, the most allowed", str(path))
    return data
