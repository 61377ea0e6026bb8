"""A process as the kernel sees it: whether it is stopped, and what part of its time it waited for a processor.

A healthy process that waits for a processor does nothing. So the server judges an engine by its progress in the time
that the engine could use. Processes that it started count with it: an engine waits for its other ranks, and for
compilers. Reads /proc (proc_pid_stat(5), and `schedstat` of each thread,
Documentation/scheduler/sched-stats.rst). Without it every process counts as running all the time.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_IS_STOPPED = frozenset("Tt")
_IS_RUNNABLE = "R"
_NS = 1e9
_LEAST_USE = 0.01
"""A process whose threads ran and waited for less than this part of the time is asleep."""


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """Time that the threads of a process, and of those that it started, used since the last look, together."""

    passed_s: float = 0.0
    ran_s: float = 0.0
    waited_s: float = 0.0
    """Seconds for which threads waited for a processor."""

    @property
    def share(self) -> float:
        """The part of its time that the process could use. It is 1 if no thread wanted a processor: what it waits for
        then is something else, and a busy machine is no excuse."""
        wanted_s = self.ran_s + self.waited_s
        return self.ran_s / wanted_s if wanted_s > 0.0 else 1.0

    @property
    def is_asleep(self) -> bool:
        """Whether hardly any thread ran or wanted to."""
        return self.ran_s + self.waited_s < _LEAST_USE * self.passed_s


class ProcessorTime:
    """One process, seen through /proc."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._seen: dict[str, tuple[int, int]] | None = None
        """Thread -> nanoseconds for which it ran and waited, at the last look."""
        self._seen_ns = 0

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        with contextlib.suppress(OSError, IndexError):
            return _state_of(self._folder) in _IS_STOPPED
        return False

    def use(self) -> ProcessorUse:
        """Its use since the last call; nothing after `forget`, or if the kernel does not tell."""
        now_ns, seen, seen_ns = time.monotonic_ns(), self._seen, self._seen_ns
        self._seen, self._seen_ns = {}, now_ns
        passed_ns, ran_ns, waited_ns = now_ns - seen_ns, 0, 0
        for folder in self._threads():
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
                ran, waited = map(int, (folder / "schedstat").read_text().split()[:2])
                self._seen[folder.name] = ran, waited
                if seen is None:
                    continue
                ran_before, waited_before = seen.get(folder.name, (0, 0))
                ran, waited = ran - ran_before, waited - waited_before
                if _state_of(folder) == _IS_RUNNABLE:
                    # The kernel adds a wait when it has ended, so the rest of the time is one that has not.
                    waited += max(passed_ns - ran - waited, 0)
                ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
        if seen is None:
            return ProcessorUse()
        return ProcessorUse(passed_ns / _NS, ran_ns / _NS, waited_ns / _NS)

    def forget(self) -> None:
        """The next `use` begins anew."""
        self._seen = None

    def _threads(self) -> list[Path]:
        """The threads of the process and of all that it started."""
        found: list[Path] = []
        folders = [self._folder]
        while folders:
            with contextlib.suppress(OSError):  # the process has ended
                tasks = folders.pop() / "task"
                threads = [tasks / name for name in os.listdir(tasks)]
                found += threads
                children = " ".join((thread / "children").read_text() for thread in threads).split()
                folders += [Path("/proc") / child for child in children]
        return found


def _state_of(folder: Path) -> str:
    """The state letter of a process or thread. Raises `OSError` or `IndexError`."""
    return (folder / "stat").read_text().rsplit(") ", 1)[1][0]
