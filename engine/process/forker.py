"""A process that has imported an engine's libraries, and forks the engines of a server: each in milliseconds.

It has one thread, loads no model and never becomes an engine itself. Its first argument is a descriptor of a socket.
Each message on it has the descriptors of one engine: a pipe for its process id, its input, and the shared memory. The
engine becomes a child of the server, because the process between this one and the engine ends at once, and the
server adopts what its children leave behind (`engine_forks`). The kernel ends this process with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from inferd.engine.models import meta_tensors
from inferd.engine.process import boot

FORKER = "inferd.engine.process.forker"
_PR_SET_PDEATHSIG = 1
_MAX_DESCRIPTORS = 8
_MAX_MESSAGE_BYTES = 1024
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46
"""Indices of `arg_start` and `arg_end` in `/proc/PID/stat`, counted from the field after the name
(proc_pid_stat(5))."""
_ADOPTED_LOOK_S = 0.0005


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    control = socket.socket(fileno=int(sys.argv[1]))
    meta_tensors.leave_out()
    boot.import_engine(boot.ENGINE, is_urgent=True)
    gc.freeze()  # the collector then leaves these pages alone, so that engines share them
    return fork_engines(control, boot.main)


def fork_engines(control: socket.socket, run: Callable[[], int]) -> int:
    """Fork an engine for each message until the socket ends. In each of them returns the exit code of `run`."""
    num_threads = _num_threads()
    if num_threads != 1:
        why = f"libraries have started {num_threads - 1} threads" if num_threads else "/proc is not mounted"
        print(f"inferd: no engine is forked, because a fork has one thread alone: {why}", file=sys.stderr)
        return 1
    while True:
        message, received, *_ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        if not message:
            return 0
        told, *own = received
        if _fork(told):
            control.close()
            os.close(told)
            _place(own, (0, *json.loads(message)))
            return run()
        for descriptor in received:
            os.close(descriptor)


def _num_threads() -> int:
    """0 if the kernel does not tell."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return 0


def _fork(told: int) -> bool:
    """Whether this is the new engine, a child of the server. Its process id is written to `told`, or minus the number
    of the error."""
    try:
        between = os.fork()
        if not between:
            _fork_once_more(told)
            return True
    except OSError as error:
        _tell(told, -(error.errno or 1))
        return False
    os.waitpid(between, 0)  # from now on the server has adopted the engine
    return False


def _fork_once_more(told: int) -> None:
    """Runs in the process between: it ends, and only the engine returns. The server learns of the engine when it has
    adopted it, and then lists of processes already show an engine."""
    between = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        _tell(told, -(error.errno or 1))
        os._exit(1)
    if pid:
        os._exit(0)
    os.setsid()
    while os.getppid() == between:
        time.sleep(_ADOPTED_LOOK_S)
    _show_as_engine()
    _tell(told, os.getpid())


def _tell(told: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the server waits no more
        os.write(told, str(number).encode())


def _place(received: list[int], wanted: tuple[int, ...]) -> None:
    """Give each received descriptor the number that the server has for it."""
    above = max(*received, *wanted) + 1
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for copy, number in zip(copies, wanted, strict=True):
        os.dup2(copy, number, inheritable=number == 0)
        os.close(copy)


def _show_as_engine() -> None:
    """Have lists of processes show the command line of an engine: who looks for one must not find this process."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
        begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
        before, found, _ = ctypes.string_at(begin, end - begin).partition(FORKER.encode())
        if found:
            ctypes.memmove(begin, (before + boot.__name__.encode()).ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    sys.exit(main())
