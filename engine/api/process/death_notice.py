"""Early notice of the engine's death: a lock in shared memory, which the engine holds for all of its life.

The system tells a parent of a child's death when all of the child is gone. Before that it frees the child's memory:
that of the example model takes 14 ms on an idle machine, up to 100 ms beside engines that compute. The lock of a dead
thread goes to the next one that waits for it (a robust mutex, pthread_mutexattr_setrobust(3)), and that comes before
the memory is freed. So a thread of the server waits for the lock. If a system has no such locks, no notice comes, and
the server learns of deaths from the child's exit alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from inferd.engine.api.process.shared_memory import open_map

LOCK_BYTES = 64
"""At least the size of a `pthread_mutex_t`: 40 bytes on x86-64, 48 on Arm."""

_LIBC = ctypes.CDLL(None)
_IS_SUPPORTED = sys.platform == "linux" and hasattr(_LIBC, "pthread_mutex_clocklock")
_PROCESS_SHARED = _ROBUST = 1
_LOOK_S = 10
"""A thread that waits in vain looks so often whether it is still wanted."""
_EXIT_CODE = 49
"""Index of `exit_code` in `/proc/PID/stat`, counted from the field after the name (proc_pid_stat(5))."""
_CORE_DUMPED = 0x80


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def hold_lock(descriptor: int, offset: int) -> None:
    """Take the lock that a `DeathNotice` waits for. The calling thread, which must live as long as the process, never
    releases it."""
    if _IS_SUPPORTED:
        memory = open_map(descriptor)
        # Never unmapped, not even when the interpreter ends: then the kernel could not find the lock any more.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        _LIBC.pthread_mutex_lock(_address(memory, offset))


class DeathNotice:
    """The server's side of one lock."""

    def __init__(self, descriptor: int, offset: int) -> None:
        """`descriptor`: file descriptor of shared memory that has `LOCK_BYTES` zeros at `offset`."""
        self._map = open_map(descriptor)
        self._address = _address(self._map, offset)
        self._thread: threading.Thread | None = None
        self._is_closed = False
        if _IS_SUPPORTED:
            attributes = ctypes.create_string_buffer(LOCK_BYTES)
            _LIBC.pthread_mutexattr_init(attributes)
            _LIBC.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
            _LIBC.pthread_mutexattr_setrobust(attributes, _ROBUST)
            _LIBC.pthread_mutex_init(self._address, attributes)

    def watch(self, pid: int, on_death: Callable[[int], None]) -> None:
        """Call `on_death`, from another thread, with the process's exit code or minus the signal that killed it. Call
        this once the process holds the lock.

        No call comes for exit code 0, if the code cannot be read, or if the system starts no more threads.
        """
        if _IS_SUPPORTED and self._thread is None and not self._is_closed:
            thread = threading.Thread(target=self._wait, args=(pid, on_death), name="inferd-death-notice", daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Stop waiting. The thread unmaps the memory when the process ends, or `_LOOK_S` later."""
        self._is_closed = True
        if self._thread is None:
            self._map.close()

    def _wait(self, pid: int, on_death: Callable[[int], None]) -> None:
        outcome = errno.ETIMEDOUT
        while outcome == errno.ETIMEDOUT and not self._is_closed:
            until = _Time(int(time.monotonic()) + _LOOK_S, 0)
            outcome = _LIBC.pthread_mutex_clocklock(self._address, time.CLOCK_MONOTONIC, ctypes.byref(until))
        if outcome == errno.EOWNERDEAD and (code := _exit_code(pid)):
            on_death(code)
        if outcome in (0, errno.EOWNERDEAD):
            _LIBC.pthread_mutex_unlock(self._address)  # else it stays listed when its memory is unmapped
        self._map.close()


def _address(memory: mmap.mmap, offset: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory, offset)))


def _exit_code(pid: int) -> int | None:
    """The exit code of a child that ends but is not gone yet, or minus the signal that kills it; None or 0 if it cannot
    be read."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]) & ~_CORE_DUMPED)
    return None
