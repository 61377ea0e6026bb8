"""A process as the kernel sees it: whether it is stopped, and what part of its time it waited for a processor.

A healthy process that waits for a processor does nothing. So the server judges an engine by its progress in the time
that the engine could use. Processes that it started count with it: an engine waits for its other ranks, and for
compilers. Reads /proc (proc_pid_stat(5), and `schedstat` of each thread,
Documentation/scheduler/sched-stats.rst). Without it every process counts as running all the time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_IS_STOPPED = frozenset("Tt")
_WAITS = frozenset("RD")
"""States of a thread that waits for a processor, or for a disk, such as one with swapped memory."""
_NS = 1e9
_LEAST_WANTED = 0.05
"""Part of the time for which a thread has to want a processor, or it counts as asleep."""
LEAST_SHARE = 0.02
"""Whatever the kernel says, a process gets on in so much of its time. So a hang is found after fifty times its bound at
the latest, even if a thread that has nothing to do with it waits for a processor."""


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """Time that the threads of a process, and of those that it started, used since the last look."""

    share: float = 1.0
    """The part of its time in which the process could get on: that of the thread that waited most for a processor. It
    is 1 if no thread wanted one: what the process waits for then is something else, and a busy machine is no excuse."""
    is_asleep: bool = False
    """Whether no thread ran or wanted to, or hardly any."""


class ProcessorTime:
    """One process, seen through /proc."""

    def __init__(self, pid: int, *, has_family: bool = True) -> None:
        """`has_family`: whether the processes that it started count with it."""
        self._folder, self._has_family = Path(f"/proc/{pid}"), has_family
        self._seen: dict[Path, tuple[int, int]] | None = None
        """Thread -> nanoseconds for which it ran and waited, at the last look."""
        self._seen_ns = 0

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        with contextlib.suppress(OSError, IndexError):
            return _state_of(self._folder) in _IS_STOPPED
        return False

    def use(self) -> ProcessorUse:
        """Its use since the last call; as of a process that always runs if there was none, or if the kernel does not
        tell."""
        now_ns, seen, passed_ns = time.monotonic_ns(), self._seen, time.monotonic_ns() - self._seen_ns
        self._seen, self._seen_ns = {}, now_ns
        share, wanted_ns = 1.0, 0
        for thread in self._threads():
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
                ran, waited = self._seen[thread] = _times_of(thread)
                before = (seen or {}).get(thread, (0, 0))
                ran, waited = ran - before[0], waited - before[1]
                if thread.name != str(threading.get_native_id()) and _state_of(thread) in _WAITS:
                    # The kernel adds a wait when it has ended, so the rest of the time is one that has not.
                    waited += max(passed_ns - ran - waited, 0)
                wanted_ns += ran + waited
                if ran + waited > _LEAST_WANTED * passed_ns:
                    share = min(share, ran / (ran + waited))
        if seen is None or not self._seen:
            return ProcessorUse()
        return ProcessorUse(max(share, LEAST_SHARE), is_asleep=wanted_ns < _LEAST_WANTED * passed_ns)

    def forget(self) -> None:
        """The next `use` begins anew."""
        self._seen = None

    def _threads(self) -> list[Path]:
        """The threads of the process, and of all that it started if they count."""
        found: list[Path] = []
        folders = [self._folder]
        while folders:
            with contextlib.suppress(OSError):  # the process has ended
                tasks = folders.pop() / "task"
                threads = [tasks / name for name in os.listdir(tasks)]
                found += threads
                if self._has_family:
                    children = " ".join((thread / "children").read_text() for thread in threads).split()
                    folders += [Path("/proc") / child for child in children]
        return found


def _times_of(thread: Path) -> tuple[int, int]:
    """Nanoseconds for which a thread ran, and waited for a processor. Raises `OSError` or `ValueError`."""
    ran, waited, _ = map(int, (thread / "schedstat").read_text().split())
    return ran, waited


def _state_of(folder: Path) -> str:
    """The state letter of a process or thread. Raises `OSError` or `IndexError`."""
    return (folder / "stat").read_text().rsplit(") ", 1)[1][0]
