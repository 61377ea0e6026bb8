"""Starts one engine process, watches it, and ends it. Nothing that it started outlives it.

The child runs `python -P -m inferd.engine.process.boot` and reads its configuration from its standard input, which
stays open. If this process dies, however it dies, the child reads the end of the file and exits. The child gets
descriptors of shared memory, which has no name. Sockets lie in a directory of mode 0700, which is removed as soon as
both sides have opened them. From then on nothing is left behind, whichever process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import inf
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.errors import StartError
from inferd.engine.api.process.death_notice import DeathNotice
from inferd.engine.api.process.flight_recorder import FlightReader, flight_bytes
from inferd.engine.api.process.heartbeat import HEARTBEAT_BYTES, LOCK_OFFSET, HeartbeatReader, Pulse
from inferd.engine.api.process.logs import DEFAULT_STYLE, LogStyle
from inferd.engine.api.process.processor_time import ProcessorTime
from inferd.engine.api.process.shared_memory import create, fill

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "300",
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    "MALLOC_TOP_PAD_": str(16 * 2**20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "OPENBLAS_NUM_THREADS": "1",
}
"""How the engine's libraries wait and allocate. The user's environment takes precedence. Measured on 2 cores of an AMD
EPYC (Zen 4), torch 2.13, GNU OpenMP and libc, 2026-11-21:

- OMP_WAIT_POLICY: torch's operations and oneDNN's products share loops by OpenMP, the C++ kernels by threads of their
  own. A waiting OpenMP thread looks for work a few microseconds, then sleeps. If it spins, it takes a core from the
  kernels' threads and from the server: 60 kernels and one operation take 94 to 122 ms instead of 73 to 99 (fastest
  tenth of three runs; busy 2 cores of an AMD Zen 3, 2026-11-23).
- GOMP_SPINCOUNT, how often a thread looks, in tokens/s. The C++ kernels used OpenMP too when this was measured. One
  client (0.6B shape, int4) on an idle machine: 0 times 44, 300 times 51, 10,000 times 55. On a busy machine: 300 times
  31, 10,000 times 10.
- THP_MEM_ALLOC_ENABLE, large pages for large tensors: 16.2 instead of 20.4 ms a step (0.6B shape, int4, one row).
- MALLOC_*: the allocator keeps the memory of a step's tensors for the next step: 110 instead of 146 ms a step (0.6B
  shape, 32 rows of a 152 k vocabulary).
- GLIBC_TUNABLES, large pages for all other memory: a killed engine is gone after 14 instead of 25 ms (example model,
  idle; Zen 4, 2026-11-26), because the system frees its memory first.
- CUDA_DEVICE_ORDER: GPUs are numbered as the driver numbers them, because their memory was counted by that number.
- OPENBLAS_NUM_THREADS: numpy, which torch imports, starts threads otherwise, and a fork would lack them.
"""

OWN_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inferd.engine.process.boot")
ENGINE_COMMAND = OWN_COMMAND
"""Command that `spawn` runs. Benchmarks and tests replace it with engines of their own."""

IMPORT_FIRST = b"\n"
"""Sent before the launch line, it makes the child import its libraries at once."""

_WAY_OUT = "free some space, or set TMPDIR to a writable directory"

_POLL_S = 0.05
"""Seconds between two looks at a child of whose end the system does not tell."""

STOP_GRACE_S = 5.0
"""Seconds that the engine has to exit when it is asked to, before it is killed."""


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The child's configuration, sent to its standard input as one line of JSON."""

    config: EngineConfig
    run_dir: str
    heartbeat_fd: int
    flight_fd: int
    epoch: int
    log_style: LogStyle
    server_pid: int
    spawned_s: float
    """Start of the engine's first phase, by the monotonic clock, which all processes of a machine share."""
    is_standby: bool = False
    """Whether to import the libraries at low priority and then wait to be promoted."""


class ChildProcess(Protocol):
    """An engine's process as its parent sees it: `subprocess.Popen`, or like it."""

    pid: int
    stdin: IO[bytes] | None
    returncode: Any
    """Exit code, or minus the signal that killed it; None before `poll` or `wait` has seen its end."""

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class StartedEarly(Protocol):
    """A process that was started before its configuration was known (`engine_forks.EarlyProcess`)."""

    def take(self) -> tuple[ChildProcess | None, list[int]]:
        """The process, and descriptors of the shared memory that it inherited. From now on they are the caller's."""
        ...


class EngineProcess:
    """One engine process, from its start to its exit code."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        epoch: int = 0,
        log_style: LogStyle = DEFAULT_STYLE,
        is_standby: bool = False,
        early: StartedEarly | None = None,
    ) -> None:
        """`early` becomes the engine process. Raises `StartError` if the run directory or shared memory cannot be
        created."""
        try:
            self.run_dir = Path(tempfile.mkdtemp(prefix="inferd-"))
        except OSError as error:
            raise StartError(f"cannot create a directory for sockets: {error.strerror or error}; {_WAY_OUT}") from error
        self.epoch = epoch
        self._process, self._shared = (None, []) if early is None else early.take()
        """The process, and descriptors of the heartbeat and the flight record, held until the child has them."""
        try:
            while len(self._shared) < 2:
                self._shared.append(create())
            fill(self._shared[0], HEARTBEAT_BYTES)
            fill(self._shared[1], flight_bytes(config.max_num_seqs or 1))
            self._pulse, self._flight = HeartbeatReader(self._shared[0]), FlightReader(self._shared[1])
            self._notice = DeathNotice(self._shared[0], LOCK_OFFSET)
        except OSError as error:
            self._end_child()
            self._close_shared()
            self.remove_run_dir()
            reason = f"cannot create shared memory for the engine process: {error.strerror or error}"
            raise StartError(
                f"{reason}; free memory, or raise the limits on memory and open files (ulimit -a)"
            ) from error
        self._config, self._log_style, self._is_standby = config, log_style, is_standby
        self._news = asyncio.Event()
        self._noticed: int | None = None
        """The child's exit code, known before all of the child is gone."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        """Whether the child is not known to be dead or dying; it may be stopped by a signal."""
        return self._process is not None and self._code is None

    @property
    def has_exited(self) -> bool:
        """Whether the child ended by itself, not by a signal."""
        return self._code is not None and self._code >= 0

    @property
    def _code(self) -> int | None:
        """The child's exit code, or minus the signal that killed it; None while it lives."""
        code = self._process.poll() if self._process else None
        return self._noticed if code is None else code

    def pulse(self) -> Pulse | None:
        """How far the engine got, read without asking it."""
        return self._pulse.read()

    @cached_property
    def processor_time(self) -> ProcessorTime:
        """The child as the kernel sees it. It must have been started."""
        return ProcessorTime(self._started().pid)

    def in_flight(self) -> dict[int, int]:
        """`FlightReader.in_flight`: the requests that the engine computes, or computed when it died. Call it before
        `discard`."""
        return self._flight.in_flight()

    def connected(self) -> None:
        """Remove the run directory, and watch for the engine's death. Call this at its first frame: then it has opened
        its sockets and holds its lock."""
        self.remove_run_dir()
        loop = asyncio.get_running_loop()

        def tell(code: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._notice_death, code)

        self._notice.watch(self._started().pid, tell)

    def _notice_death(self, code: int) -> None:
        self._noticed = code
        self._news.set()

    def remove_run_dir(self) -> None:
        """Remove the run directory once the engine has connected its sockets; open sockets go on working."""
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def kill(self) -> None:
        """End the child and what it started now, even if it is stopped or hangs."""
        if self._process is not None and self._process.poll() is None:
            _send(self._process, signal.SIGKILL)

    def spawn(self) -> None:
        """Start the child, unless it runs already. It inherits standard error; its standard output is not used.

        Raises `StartError` if the system cannot start a process.
        """
        launch = EngineLaunch(
            config=self._config,
            run_dir=str(self.run_dir),
            heartbeat_fd=self._shared[0],
            flight_fd=self._shared[1],
            epoch=self.epoch,
            log_style=self._log_style,
            server_pid=os.getpid(),
            spawned_s=time.monotonic(),
            is_standby=self._is_standby,
        )
        try:
            self._process = self._process or start_child(ENGINE_COMMAND, self._shared)
        except OSError as error:
            raise StartError(f"cannot start the engine process: {error.strerror or error}") from error
        self._close_shared()
        write_line(self._process, msgspec.json.encode(launch) + b"\n")

    def promote(self) -> None:
        """Make a standby load the model and serve."""
        write_line(self._started(), b"\n")

    def _close_shared(self) -> None:
        while self._shared:
            os.close(self._shared.pop())

    def _close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # the pipe is closed nevertheless
                self._process.stdin.close()

    async def news(self, within_s: float) -> int | None:
        """Wait until the child's main thread is dead, `wake` is called, or so many seconds have passed.

        Returns the child's exit code or minus the signal that killed it, None while it lives. Its other threads may run
        a moment longer, and its memory may not be free yet.
        """
        process, latest_s = self._started(), time.monotonic() + within_s
        while self._code is None and not self._news.is_set() and (left_s := latest_s - time.monotonic()) > 0.0:
            with contextlib.suppress(TimeoutError), _told_of_exit(process, self._news.set) as longest_s:
                async with asyncio.timeout(min(left_s, longest_s)):
                    await self._news.wait()
        self._news.clear()
        return self._code

    def wake(self) -> None:
        """End a wait for news."""
        self._news.set()

    async def wait(self) -> int:
        """Wait until the child is gone and its memory is free. Returns its exit code, or minus the signal."""
        process, gone = self._started(), asyncio.Event()
        while process.poll() is None:
            with contextlib.suppress(TimeoutError), _told_of_exit(process, gone.set) as longest_s:
                async with asyncio.timeout(longest_s):
                    await gone.wait()
        code: int = process.returncode
        return code

    async def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """End the child: close its input, wait, send SIGTERM, then SIGKILL. Removes the run directory."""
        try:
            return await self._stop(grace_s)
        finally:
            self.discard()

    async def _stop(self, grace_s: float) -> int:
        process = self._started()
        self._close_input()
        for send in (None, signal.SIGTERM, signal.SIGKILL):
            if send is not None and process.poll() is None:
                logger.warning("engine process %d did not exit in %.1f s: sending %s", process.pid, grace_s, send.name)
                _send(process, send)
            try:
                return await asyncio.wait_for(self.wait(), grace_s)
            except TimeoutError:
                continue
        raise AssertionError("a process outlived SIGKILL")

    def discard(self) -> None:
        """Kill the child if it still runs, and remove the run directory. Blocks until the child is gone. Safe to call
        twice."""
        self._end_child()
        self._pulse.close()
        self._flight.close()
        self._notice.close()
        self._close_shared()
        self.remove_run_dir()

    def _end_child(self) -> None:
        if self._process is not None:
            self.kill()
            self._process.wait()
            self._close_input()

    def _started(self) -> ChildProcess:
        if self._process is None:
            raise RuntimeError("the engine was never started")
        return self._process


def start_child(command: Sequence[str], shared: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a child that inherits the descriptors `shared`. Raises `OSError`."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,  # otherwise closing the pipe to a dead child would try to write what is left
        env=ENVIRONMENT | os.environ,
        start_new_session=True,
        pass_fds=tuple(shared),
    )


def write_line(process: ChildProcess, line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the child is dead already, and `wait` returns its exit code
        while line:  # a signal may cut a write short
            line = line[process.stdin.write(line) :]


def _send(process: ChildProcess, number: signal.Signals) -> None:
    """Send a signal to a process that `poll` has not seen dead, and to those that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # to macOS nobody may signal the dead
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _told_of_exit(process: ChildProcess, tell: Callable[[], None]) -> Iterator[float]:
    """Call `tell` when the process is gone. Gives the seconds after which the caller must look for itself."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or the limit on open files is reached
        yield _POLL_S
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, tell)
    try:
        yield inf
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def describe_exit(code: int) -> str:
    """An exit code as text."""
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by {signal.Signals(-code).name}"
