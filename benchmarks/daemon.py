"""A server process under measurement: started in its own process group, timed until READY, and reliably ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_SAMPLE_S = 0.1
_STOP_GRACE_S = 30.0
_LOG_TAIL_CHARS = 2000


class DaemonError(RuntimeError):
    """The server did not start; holds the end of its output."""


class Daemon:
    """One server and the processes that it started."""

    def __init__(self, command: Sequence[str], log: Path, ready_within_s: float, ready_path: str = "/ready") -> None:
        """Run `command` with a host and port, and wait until `ready_path` answers. Raises `DaemonError`."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.peak_rss_bytes = 0
        self._log, self._ready_path = log, ready_path
        self._is_over = threading.Event()
        started_s = time.perf_counter()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._tree = psutil.Process(self._process.pid)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        try:
            self._wait_ready(started_s + ready_within_s)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - started_s
        """Seconds from the command until it accepts requests."""

    @property
    def pid(self) -> int:
        """Process id of the server; its engine is a child."""
        return self._process.pid

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds used so far, by the server and by its engine."""
        used = {"server": _cpu_s(self._tree), "engine": 0.0}
        for child in self._tree.children(recursive=True):
            used["engine"] += _cpu_s(child)
        return used

    def pss_bytes(self) -> int:
        """Memory of the server and of all that it started; what processes share is divided between them."""
        return sum(map(_pss_bytes, self._processes()))

    def wait(self, within_s: float) -> int:
        """The exit code of a server that was asked to end. Raises `subprocess.TimeoutExpired`."""
        return self._process.wait(within_s)

    def stop(self) -> None:
        """Ask the server to end, then kill it and all processes that it started."""
        self._is_over.set()
        left = self._processes()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._watcher.join()

    def _wait_ready(self, until_s: float) -> None:
        while time.perf_counter() < until_s:
            if self._process.poll() is not None:
                raise DaemonError(f"the server exited with {self._process.returncode}: {self._tail()}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.url}{self._ready_path}", timeout=5).close()
                return
            time.sleep(0.02)
        raise DaemonError(f"the server was not ready in time: {self._tail()}")

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-_LOG_TAIL_CHARS:].strip()

    def _watch(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            self.peak_rss_bytes = max(self.peak_rss_bytes, sum(map(_rss_bytes, self._processes())))

    def _processes(self) -> list[psutil.Process]:
        try:
            return [self._tree, *self._tree.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, ready_within_s: float = 600.0, ready_path: str = "/ready"
) -> Iterator[Daemon]:
    """A daemon that ends with the block."""
    daemon = Daemon(command, log, ready_within_s, ready_path)
    try:
        yield daemon
    finally:
        daemon.stop()


def _rss_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0


def _pss_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
