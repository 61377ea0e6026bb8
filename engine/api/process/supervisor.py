"""Starts the engine process, watches it, and ends it: nothing it started outlives it.

The child runs `python -P -m inferd.engine.process.boot` and reads its configuration from its standard input, which
stays open: when this process dies, however it dies, the child reads the end of file and exits. Shared memory has no
name; its descriptors are passed on. Sockets lie in a directory of mode 0700 that goes as soon as both sides hold them
open: from
then on nothing is left behind, whoever dies. One supervisor serves one life of one engine.
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
from pathlib import Path

import msgspec

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.errors import StartError
from inferd.engine.api.process.flight_recorder import FlightReader, flight_bytes
from inferd.engine.api.process.heartbeat import HEARTBEAT_BYTES, HeartbeatReader, Pulse
from inferd.engine.api.process.logs import DEFAULT_STYLE, LogStyle
from inferd.engine.api.process.shared_memory import allocate

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "300",
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    "MALLOC_TOP_PAD_": str(16 * 2**20),
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
"""How the engine's libraries wait and take memory; what the user's environment says goes first. Measured on 2 cores of
an AMD EPYC (Zen 4), torch 2.13, GNU OpenMP and libc, 2026-11-21:

- Threads that wait for others look for work a few microseconds, then sleep. To spin for as long as it takes costs a
  step 5 to 14 times its time where the cores are shared, as with the server process (0.6B shape cut to 8 layers, 2
  busy cores). How often they look, tokens/s of one client (0.6B shape, int4, nobody else at work): 0 times 44, 300
  times 51, 2,000 times 53, 10,000 times 55; with others at work 300 times 31 and 10,000 times 10. Of 256 clients (one
  small layer): 300 times 14,100 to 15,900 beside 13,100 at 1,000; in another run, on a busier machine, 200 times
  10,500 to 13,700 beside 5,800 to 7,300 at 10,000.
- Large pages for large tensors: 16.2 against 20.4 ms a step (0.6B shape, int4, one row).
- A step's tensors come from memory that the step before gave back to the allocator and not to the system: 110 against
  146 ms a step (0.6B shape, 32 rows of a 152 k vocabulary).
- GPUs are numbered as the driver numbers them, by which their memory was counted.
"""

ENGINE_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inferd.engine.process.boot")
"""Command that `spawn` runs. A benchmark or a test puts an engine of its own here."""

_WAY_OUT = "free some space, or set TMPDIR to a directory that can be written to"

STOP_GRACE_S = 5.0
"""How long the engine has to exit after it was asked to, before it is killed."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What the child is told on its standard input, as one line of JSON."""

    config: EngineConfig
    run_dir: str
    heartbeat_fd: int
    flight_fd: int
    epoch: int
    log_style: LogStyle
    server_pid: int
    spawned_s: float
    """Monotonic, which all processes of a machine share: the engine's first phase began then."""
    is_standby: bool = False
    """Read the libraries, at low priority, and wait to be promoted."""


class Supervisor:
    """One engine process, from spawn to exit code."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        epoch: int = 0,
        log_style: LogStyle = DEFAULT_STYLE,
        is_standby: bool = False,
    ) -> None:
        """Raises `StartError` if there is no run directory or no shared memory to be had."""
        try:
            self.run_dir = Path(tempfile.mkdtemp(prefix="inferd-"))
        except OSError as error:
            raise StartError(f"there is no directory for sockets: {error.strerror or error}; {_WAY_OUT}") from error
        self.epoch = epoch
        self._shared: list[int] = []
        """Descriptors of the heartbeat and the flight record, until the child has them."""
        try:
            for num_bytes in (HEARTBEAT_BYTES, flight_bytes(config.max_num_seqs or 1)):
                self._shared.append(allocate(num_bytes))
            self._pulse, self._flight = HeartbeatReader(self._shared[0]), FlightReader(self._shared[1])
        except OSError as error:
            self._close_shared()
            self.seal()
            reason = f"cannot make shared memory for the engine's process: {error.strerror or error}"
            raise StartError(
                f"{reason}; free memory, or raise the limits on memory and open files (ulimit -a)"
            ) from error
        self._config, self._log_style, self._is_standby = config, log_style, is_standby
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        """Whether there is a child; it may be stopped."""
        return self._process is not None and self._process.poll() is None

    @property
    def has_exited(self) -> bool:
        """Whether the child ended by itself, with an exit code and not by a signal."""
        code = self._process.poll() if self._process else None
        return code is not None and code >= 0

    def pulse(self) -> Pulse | None:
        """The engine's last beat, read without asking the engine."""
        return self._pulse.read()

    def in_flight(self) -> dict[int, int]:
        """What the engine computes, or did when it died: `FlightReader.in_flight`. Not once this is discarded."""
        return self._flight.in_flight()

    def seal(self) -> None:
        """The engine has connected the sockets in the run directory: take the names away, and keep what they name."""
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def kill(self) -> None:
        """End the child now, also one that is stopped or hangs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def spawn(self) -> None:
        """Start the child. Its standard error is ours; its standard output is not used.

        Raises `StartError` where the system gives no process.
        """
        launch = Launch(
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
            self._process = subprocess.Popen(
                ENGINE_COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                bufsize=0,  # what a dead child did not take must not wait to be written when the pipe is closed
                env=_ENVIRONMENT | os.environ,
                start_new_session=True,
                pass_fds=self._shared,
            )
        except OSError as error:
            raise StartError(f"cannot start the engine's process: {error.strerror or error}") from error
        self._close_shared()
        self._tell(msgspec.json.encode(launch) + b"\n")

    def promote(self) -> None:
        """Have a standby load the model and serve."""
        self._tell(b"\n")

    def _tell(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, as `wait` will tell
            while line:  # a signal may cut a write short
                line = line[self._process.stdin.write(line) :]

    def _close_shared(self) -> None:
        while self._shared:
            os.close(self._shared.pop())

    def _close_input(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it is closed all the same
                self._process.stdin.close()

    async def wait(self) -> int:
        """The exit code, once the child is gone; negative: killed by that signal."""
        process = self._started()
        while process.poll() is None:
            await _exited(process)
        return process.returncode

    async def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """End the child: close its input, wait, then SIGTERM, then SIGKILL. Removes the run directory."""
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
                process.send_signal(send)
            try:
                return await asyncio.wait_for(self.wait(), grace_s)
            except TimeoutError:
                continue
        raise AssertionError("a process outlived SIGKILL")

    def discard(self) -> None:
        """Kill what is left and remove the run directory; safe to call twice."""
        if self._process is not None:
            self.kill()
            self._process.wait()
            self._close_input()
        self._pulse.close()
        self._flight.close()
        self._close_shared()
        self.seal()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the engine was never started")
        return self._process


async def _exited(process: subprocess.Popen[bytes]) -> None:
    """Return when the process is gone (or sooner: the caller polls)."""
    if not hasattr(os, "pidfd_open"):
        await asyncio.sleep(0.05)
        return
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except OSError:  # no more files may be open
        await asyncio.sleep(0.05)
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by {signal.Signals(-code).name}"
