"""Engine processes that have their libraries imported already, so that the next one takes over soon after a death.

The server keeps a process that has imported the libraries and forks engines (`engine/process/forker`). They share its
memory, so it takes little beside an engine. On a machine with a GPU there is no such process, because no GPU has tested
a fork. Then the first engine imports its libraries while the server still reads the checkpoint, and each later one when
it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO

from inferd.engine.api.errors import CapacityError, StartError
from inferd.engine.api.machine import gpu
from inferd.engine.api.process import engine_process
from inferd.engine.api.process.engine_process import IMPORT_FIRST, ChildProcess, start_child, write_line
from inferd.engine.api.process.processor_time import ProcessorTime
from inferd.engine.api.process.shared_memory import create

logger = logging.getLogger("inferd")

_ENGINE_COMMAND = engine_process.OWN_COMMAND
FORKER_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inferd.engine.process.forker")
"""Command of the process that forks engines. Tests replace it."""

_IMPORT_TIMEOUT_S, _FORK_TIMEOUT_S = 120.0, 10.0
"""Most seconds that the forking process could use until the first engine is there, and each later one. A fork takes
30 ms, and the imports before the first one take 2 s (2 cores, AMD EPYC Zen 3, 2026-11-29)."""
_LOOK_S = 0.25
"""Seconds between two looks at how much of the time it could use."""
_PR_SET_CHILD_SUBREAPER = 36
_MAX_DIGITS = 32


class EarlyProcess:
    """An engine process that waits for its configuration. Then an `EngineProcess` takes it over."""

    def __init__(self, process: ChildProcess, shared: Sequence[int]) -> None:
        """`shared`: descriptors of the shared memory that it inherited."""
        self._process: ChildProcess | None = process
        self._shared = [*shared]

    @classmethod
    def start(cls) -> EarlyProcess:
        """A new process, which begins to import its libraries. Raises `StartError` if the system cannot start one."""
        with contextlib.ExitStack() as undo, _as_start_error():
            shared = _make_shared(undo)
            process = start_child(engine_process.ENGINE_COMMAND, shared)
            undo.pop_all()
        write_line(process, IMPORT_FIRST)
        return cls(process, shared)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def take(self) -> tuple[ChildProcess | None, list[int]]:
        """The process, and descriptors of the shared memory that it inherited. From now on they are the caller's."""
        taken = self._process, self._shared
        self._process, self._shared = None, []
        return taken

    def close(self) -> None:
        """Kill the process, unless it was taken over."""
        process, shared = self.take()
        for descriptor in shared:
            os.close(descriptor)
        if process is not None:
            assert process.stdin is not None
            process.kill()
            process.wait()
            process.stdin.close()


class ForkedProcess:
    """A process that another one forked, and that this process adopted. Like a `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = stdin
        self.returncode: int | None = None
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        with self._waiting:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, options)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode


class _ForkError(Exception):
    """No engine can be forked. The message says why."""


class EngineForks:
    """Starts engine processes ahead of their use."""

    def __init__(self) -> None:
        """Starts the process that forks, or else the first engine. Raises `StartError` if the system starts none."""
        self._early: EarlyProcess | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._timeout_s = _IMPORT_TIMEOUT_S
        if _may_fork():
            with _as_start_error():
                self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    self._process = start_child((*FORKER_COMMAND, str(theirs.fileno())), [theirs.fileno()])
            self._control.setblocking(False)
        else:
            self._early = EarlyProcess.start()

    @property
    def pid(self) -> int | None:
        """The process that forks; None if there is none."""
        return None if self._process is None else self._process.pid

    async def next(self) -> EarlyProcess | None:
        """An engine process; None if the next one has to import its libraries first. Raises `StartError`."""
        early, self._early = self._early, None
        if early is not None or self._control is None:
            return early
        try:
            early = await self._fork(self._control)
        except _ForkError as error:
            process = self._process
            self.close()
            # Another replica may have asked at the same time. An engine that lacks memory too says so itself.
            if process is not None and process.returncode != CapacityError.exit_code:
                logger.warning("engines are no longer forked: %s; each imports its libraries when it starts", error)
            return None
        self._timeout_s = _FORK_TIMEOUT_S
        return early

    def close(self) -> None:
        """End the processes that nobody has taken over."""
        if self._early is not None:
            self._early.close()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.wait()
            self._process.stdin.close()
            self._process = None

    async def _fork(self, control: socket.socket) -> EarlyProcess:
        """Raises `_ForkError`, and `StartError` if this process may open no more files."""
        with contextlib.ExitStack() as undo, _adopts_orphans():
            assert self._process is not None
            shared, stdin, answer = _request(control, undo)
            process = ForkedProcess(await self._pid(answer.fileno(), ProcessorTime(self._process.pid)), stdin)
            undo.pop_all()
            answer.close()
        return EarlyProcess(process, shared)

    async def _pid(self, told: int, forker: ProcessorTime) -> int:
        """The id of a process that was forked, once it can be read."""
        loop, is_there, usable_s = asyncio.get_running_loop(), asyncio.Event(), 0.0
        loop.add_reader(told, is_there.set)
        forker.use()
        try:
            while not is_there.is_set():
                if usable_s > self._timeout_s:
                    raise _ForkError(f"the process that forks them has not answered for {self._timeout_s:g} s")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await is_there.wait()
                usable_s += _LOOK_S * forker.use().share
        finally:
            loop.remove_reader(told)
        return _adopted(int(os.read(told, _MAX_DIGITS) or 0))


def _request(control: socket.socket, undo: contextlib.ExitStack) -> tuple[list[int], IO[bytes], IO[bytes]]:
    """Ask for a fork. Returns its shared memory, its input, and a pipe with its process id, which `undo` closes.

    Raises `_ForkError`, and `StartError` if this process may open no more files.
    """
    with contextlib.ExitStack() as theirs:
        with _as_start_error():
            shared = _make_shared(undo)
            source, to_engine = os.pipe()
            stdin: IO[bytes] = undo.enter_context(open(to_engine, "wb", buffering=0))
            theirs.callback(os.close, source)
            told, tell = os.pipe()
            answer: IO[bytes] = undo.enter_context(open(told, "rb", buffering=0))
            theirs.callback(os.close, tell)
        try:
            socket.send_fds(control, [json.dumps(shared).encode()], [tell, source, *shared])
        except OSError as error:
            raise _ForkError(f"the process that forks them has ended ({error.strerror})") from error
    return shared, stdin, answer


def _adopted(number: int) -> int:
    """`number`, which the forking process wrote, if it is the id of a child. Raises `_ForkError` otherwise."""
    if number < 0:
        raise _ForkError(f"the system says: {os.strerror(-number)}")
    if number == 0:
        raise _ForkError("the process that forks them has ended")
    try:
        os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        raise _ForkError("the system does not make them children of the server") from None
    return number


def _may_fork() -> bool:
    if sys.platform != "linux" or engine_process.ENGINE_COMMAND != _ENGINE_COMMAND:
        return False
    if not os.path.exists("/proc/self/task"):  # the forking process could not tell whether it has threads
        return False
    try:
        gpu.detect()
    except gpu.NoAcceleratorError:
        return True
    return False


_num_adopting = 0


@contextlib.contextmanager
def _adopts_orphans() -> Iterator[None]:
    """Makes this process the parent of processes whose parent, one of its descendants, ends meanwhile.

    Not for longer than a fork takes: nothing would wait for the end of others.
    """
    global _num_adopting
    _num_adopting += 1
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _num_adopting -= 1
        if not _num_adopting:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _make_shared(undo: contextlib.ExitStack) -> list[int]:
    """Descriptors of two pieces of shared memory, which `undo` closes. Raises `OSError`."""
    made = []
    for _ in range(2):
        made.append(create())
        undo.callback(os.close, made[-1])
    return made


@contextlib.contextmanager
def _as_start_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartError(f"cannot start the engine process: {error.strerror or error}") from error
