"""Where a run takes place: the machine and the day, for a report, and the file of what its server says."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import psutil


def place() -> str:
    """As in "2 cores, AMD EPYC 9R14, 24 GiB, 2026-11-21"."""
    num_cores = len(os.sched_getaffinity(0))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    memory_gib = round(psutil.virtual_memory().total / 2**30)
    return f"{num_cores} cores, {next(names, 'unknown processor')}, {memory_gib} GiB, {datetime.now(UTC):%Y-%m-%d}"


@contextmanager
def log_of(program: str) -> Iterator[Path]:
    """A new file, for several runs may go on at once; kept, and said where, if the block ends with an error."""
    log = Path(tempfile.mkdtemp(prefix=f"inferd-{program}-")) / "server.log"
    try:
        yield log
    except BaseException:
        print(f"What the server said: {log}")
        raise
    shutil.rmtree(log.parent)
