"""The engine process, from its first moment: what must hold while its libraries are still being read.

Reads the launch line from standard input and keeps that open: its end means the server is gone or wants this process
gone, and then it exits at once and leaves no sockets behind; one more byte promotes a standby. Only then imports the
engine, for a second or more.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from inferd.engine.api.process import garbage

logger = logging.getLogger("inferd")

_ENGINE = "inferd.engine.process.main"
_NICE = 10
"""Of the thread that reads a standby's libraries: beside threads that never wait it gets a tenth of a core, and has
1.4 s of work done in a quarter of a minute. Linux keeps it by thread, and those of the main one are as urgent as any:
to be so again, a process would need a right."""


_MAX_TRIES, _TRY_S = 50, 0.1
"""The kernel takes one such change in 0.1 s, of all users together."""


def main() -> int:
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    launch = json.loads(line)
    promoted = _die_with_the_server(launch["run_dir"])
    code: int = _engine(is_urgent=not launch["is_standby"]).main(line, promoted)
    return code


def _die_with_the_server(run_dir: str) -> threading.Event:
    """Exit at the end of standard input, which comes however the server ends. Set: something came before that.

    A terminal's Ctrl-C is the server's to handle: it lets running requests finish.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    promoted = threading.Event()

    def watch() -> None:
        # Not through sys.stdin, whose lock this thread would hold while the interpreter ends.
        while os.read(0, 4096):
            promoted.set()
        shutil.rmtree(run_dir, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="inferd-death-pipe", daemon=True).start()
    return promoted


def _engine(*, is_urgent: bool) -> ModuleType:
    if is_urgent or sys.platform != "linux":
        return _read_engine()
    _set_nice_of_session(_NICE)
    try:
        with ThreadPoolExecutor(1, initializer=_be_nice) as thread:
            return thread.submit(_read_engine).result()
    finally:
        if not _set_nice_of_session(0):
            logger.warning("the engine's session keeps nice %d: /proc/self/autogroup took no other value", _NICE)


def _read_engine() -> ModuleType:
    with garbage.collector_paused():
        return importlib.import_module(_ENGINE)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def _set_nice_of_session(nice: int) -> bool:
    """Where the kernel shares processors out by session first (sched(7), autogroups), a thread's own comes second.

    False: it did not take it.
    """
    for _ in range(_MAX_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(nice))
        except BlockingIOError:
            time.sleep(_TRY_S)
        except OSError:
            return True  # it does not share them out so
        else:
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
