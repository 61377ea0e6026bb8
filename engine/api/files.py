"""Files that others write, read within a bound. A pinned file is read in place of one that has its name by now.

Opening a FIFO waits until another process writes to it, and reading a terminal or a device may never end.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from io import BufferedReader
from pathlib import Path

from inferd.engine.api.pinned_files import source_of


def cache_folder(name: str) -> Path:
    """The folder for what a server keeps for the next one, by the XDG base directory specification. For a user without
    a home directory it lies among the temporary files."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(given) if given else Path.home() / ".cache"
    except RuntimeError:
        home = Path(tempfile.gettempdir()) / f"inferd-{os.geteuid()}"
    return home / "inferd" / name


def refuse_others(folder: Path) -> None:
    """Raises `OSError` for a folder in which another user may have put entries, or that another may exchange."""
    if not folder.exists():
        return
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        reason = "it belongs to another user, or others may write to it: make it yours (chmod 700)"
        raise OSError(errno.EACCES, reason, str(folder))
    for above in folder.parents:
        is_shared = above.parent.stat().st_mode & 0o002  # such as /tmp
        if is_shared and above.lstat().st_uid not in (0, os.geteuid()):
            reason = f"{above} belongs to another user: remove it, or set XDG_CACHE_HOME"
            raise OSError(errno.EACCES, reason, str(folder))


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read it. Raises `OSError`, also for another kind of file."""
    descriptor = os.open(source_of(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it must be a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a whole regular file. Raises `OSError`, also for another kind of file and for more than `max_bytes`."""
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        data = file.read(max_bytes + 1) if num_bytes <= max_bytes else b""
    if num_bytes > max_bytes or len(data) > max_bytes:
        given = max(num_bytes, len(data))
        raise OSError(errno.EFBIG, f"it has {given} bytes, and at most {max_bytes} are allowed", str(path))
    return data
