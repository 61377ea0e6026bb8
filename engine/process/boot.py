"""Start of the engine process: all that must work while its libraries are still being imported.

Reads the launch line from standard input and keeps that open. The end of the input means that the server is gone, or
wants this process to end. Then the process exits at once and leaves no sockets behind. One more byte promotes a
standby. Only then is the engine imported, which takes a second or more.
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
"""Nice value of the thread that imports a standby's libraries. Beside busy threads it gets a tenth of a core, and does
1.4 s of work in a quarter of a minute. On Linux each thread has its own value, and the main thread keeps the normal
one. A process needs a privilege to raise its priority again, so the main thread is never lowered."""


_MAX_TRIES, _TRY_S = 50, 0.1
"""The kernel takes one such change in 0.1 s, for all users together."""


def main() -> int:
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    launch = json.loads(line)
    promoted = _exit_with_server(launch["run_dir"])
    code: int = _load_engine(is_urgent=not launch["is_standby"]).main(line, promoted)
    return code


def _exit_with_server(run_dir: str) -> threading.Event:
    """Exit at the end of standard input, which comes however the server ends. The event returned is set by any input
    before that.

    Ctrl-C in a terminal is left to the server, which lets running requests finish.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    promoted = threading.Event()

    def watch() -> None:
        # Not through sys.stdin: this thread would hold its lock while the interpreter ends.
        while os.read(0, 4096):
            promoted.set()
        shutil.rmtree(run_dir, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="inferd-stdin", daemon=True).start()
    return promoted


def _load_engine(*, is_urgent: bool) -> ModuleType:
    if is_urgent or sys.platform != "linux":
        return _import_engine()
    _set_nice_of_session(_NICE)
    try:
        with ThreadPoolExecutor(1, initializer=_lower_priority) as thread:
            return thread.submit(_import_engine).result()
    finally:
        if not _set_nice_of_session(0):
            logger.warning("the engine's session keeps nice %d: /proc/self/autogroup took no other value", _NICE)


def _import_engine() -> ModuleType:
    with garbage.collector_paused():
        return importlib.import_module(_ENGINE)


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


def _set_nice_of_session(nice: int) -> bool:
    """Set the nice value of this session. If the kernel groups by session (sched(7), autogroups), it comes before the
    thread's own.

    Returns whether the kernel took it, or does not group by session.
    """
    for _ in range(_MAX_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(nice))
        except BlockingIOError:
            time.sleep(_TRY_S)
        except OSError:
            return True  # it does not group by session
        else:
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
