"""The log file of a run's server."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def log_of(program: str) -> Iterator[Path]:
    """A new file, because several runs may go on at once. If the block ends with an error, keeps it and prints its
    path."""
    log = Path(tempfile.mkdtemp(prefix=f"inferd-{program}-")) / "server.log"
    try:
        yield log
    except BaseException:
        print(f"What the server said: {log}")
        raise
    shutil.rmtree(log.parent)
