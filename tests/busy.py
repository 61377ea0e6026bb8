"""A busy machine: processes that compute for ever beside those under test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_machine(num_processes: int) -> Iterator[None]:
    """Run so many spinning processes. Each has a session of its own, because the kernel may share the processors among
    sessions first (sched(7))."""
    spin = (sys.executable, "-c", "while True: pass")
    started = [subprocess.Popen(spin, start_new_session=True) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
