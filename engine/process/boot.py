"""Start of the engine process: all that must work while its libraries are still being imported.

Reads the launch line from standard input and keeps that open. The end of the input means that the server is gone, or
wants this process to end. Then the process does what the engine wants done before, for some seconds at most. It ends
with those that it started, and leaves no sockets behind. One more byte promotes a standby. The engine is imported after
the launch line, or before it if an empty line comes first. That takes a second or more. The engine's other ranks are
started before, so that they import theirs at the same time.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from inferd.engine.api.errors import CapacityError, shortage
from inferd.engine.api.process import garbage
from inferd.engine.models import meta_tensors
from inferd.engine.process.priority import set_nice_of_session

logger = logging.getLogger("inferd")

ENGINE = "inferd.engine.process.main"
_RANKS = "inferd.engine.worker.followers"
_NICE = 10
"""Nice value of the thread that imports a standby's libraries. Beside busy threads it gets a tenth of a core, and does
1.4 s of work in a quarter of a minute. On Linux each thread has its own value, and the main thread keeps the normal
one. A process needs a privilege to raise its priority again, so the main thread is never lowered."""


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C, and lets running requests finish
    meta_tensors.leave_out()
    source = _Input()
    line = source.lines.get()
    if line == b"\n":  # the server will know the configuration later
        import_engine(ENGINE, is_urgent=True)
        line = source.lines.get()
    launch = json.loads(line)
    is_standby: bool = launch["is_standby"]
    ranks = () if launch["config"]["tensor_parallel_size"] == 1 else _start_ranks(line)
    engine = import_engine(ENGINE, is_urgent=not is_standby)
    code: int = engine.main(line, source.promoted, *ranks, before_end=source.before_end)
    return code


def _start_ranks(line: bytes) -> tuple[Any, ...]:
    """The other ranks of the engine; nothing if the system cannot start them, which the engine tries again and
    reports."""
    started: tuple[Any, ...] = importlib.import_module(_RANKS).started_early(line)
    return started


class _Input:
    """Standard input, read by a thread from the first moment. The thread ends this process at the end of the input,
    which comes however the server ends."""

    def __init__(self) -> None:
        self.lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        """All lines up to the launch line."""
        self.promoted = threading.Event()
        """Set by any input after the launch line."""
        self.before_end: list[Callable[[], None]] = []
        """Called at the end of the input, if the server lives. Each returns within some seconds."""
        threading.Thread(target=self._read, name="inferd-stdin", daemon=True).start()

    def _read(self) -> None:
        run_dir = None
        # Not through sys.stdin: this thread would hold its lock while the interpreter ends.
        with open(0, "rb", closefd=False) as source:
            for line in source:
                if run_dir is not None:
                    self.promoted.set()
                    continue
                self.lines.put(line)
                if line != b"\n":
                    run_dir = json.loads(line)["run_dir"]
        if run_dir is not None:
            shutil.rmtree(run_dir, ignore_errors=True)
        try:
            for act in self.before_end:
                act()
        finally:
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)  # compilers too, which would go on for a minute
            os._exit(0)


def import_engine(name: str, *, is_urgent: bool) -> ModuleType:
    """Import a module with the libraries of an engine, at low priority if it is not urgent."""
    if is_urgent or sys.platform != "linux":
        return _import(name)
    set_nice_of_session(_NICE)
    try:
        with ThreadPoolExecutor(1, initializer=_lower_priority) as thread:
            return thread.submit(_import, name).result()
    finally:
        if not set_nice_of_session(0):
            logger.warning("the engine's session keeps nice %d: /proc/self/autogroup took no other value", _NICE)


def _import(name: str) -> ModuleType:
    """Import a module. If there is not enough memory for it, this process ends, and its exit code says so."""
    try:
        with garbage.collector_paused():
            return importlib.import_module(name)
    except Exception as error:
        if shortage(error) is None:
            raise
        os._exit(CapacityError.exit_code)


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


if __name__ == "__main__":
    sys.exit(main())
