"""Real daemons for end-to-end tests: `inferd serve` in a process of its own, on a free port, with its output kept."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests import forking
from tests.conftest import FRESH

if TYPE_CHECKING:
    from openai import OpenAI

INFERD = Path(sys.executable).parent / "inferd"
SHAPES_USED = ("smoke", "12m")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def free_model(step_ms: float) -> tuple[str, ...]:
    """Program in place of `INFERD`. Server and engine process are real, but the model only sleeps.

    For tests of processes that do not depend on the model. This engine starts with a tenth of the processor time.
    """
    return sys.executable, str(BENCHMARKS / "free_server.py"), "--step-ms", str(step_ms)


def children(pid: int) -> dict[int, str]:
    """Child process id -> command line, the oldest child first."""
    found = psutil.Process(pid).children()
    commands: dict[int, str] = {}
    for child in sorted(found, key=lambda child: (child.create_time(), child.pid)):
        with suppress(psutil.NoSuchProcess):  # it is no more
            commands[child.pid] = " ".join(child.cmdline())
    return commands


def is_engine(command: str) -> bool:
    """Whether a command line is that of an engine process, or of a program that benchmarks and tests use as one."""
    programs = ("inferd.engine.process.boot", "free_engine.py", "faulty_engine.py", "traced_server.py")
    return any(name in command for name in programs)


class Daemon:
    """One `inferd serve`."""

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        program: Sequence[str] = (str(INFERD),),
        may_fork: bool = True,
    ) -> None:
        """`may_fork`: whether the server may be a fork of a process that has imported its libraries (`forking`). A test
        of its memory needs one that shares none."""
        # Files of tests are read by no later start, so their weights are not kept.
        env = {"INFERD_WEIGHT_CACHE": "false", **(env or {})}
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.process: subprocess.Popen[str] | forking.Forked
        command = [*program, "serve", *arguments, "--port", "0"]
        script = forking.script_of(command, env) if may_fork else None
        if script is not None:
            self.process = forking.start(script, env)
        else:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **env},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if "curl http" in line:
                self._ready.set()
        self._ready.set()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @property
    def curl(self) -> str:
        """The curl command of the READY card."""
        return next(line.strip() for line in self.lines if "curl http" in line)

    @property
    def url(self) -> str:
        found = re.search(r"http://[^/ ]+:\d+", self.curl)
        assert found is not None, self.output
        return found.group()

    @property
    def engine_pids(self) -> list[int]:
        """The ids of the engine processes."""
        return [pid for pid, command in children(self.process.pid).items() if is_engine(command)]

    @property
    def engine_pid(self) -> int:
        """The id of the engine process. Raises `StopIteration` if there is none."""
        return next(iter(self.engine_pids))

    def wait_ready(self) -> None:
        """Raises if the daemon is not ready in time. In a fresh checkout it compiles the kernels first, which takes
        minutes on a busy machine."""
        assert self._ready.wait(280), self.output
        assert self.process.poll() is None, self.output

    def client(self, **options: object) -> OpenAI:
        # Most tests that start a daemon never ask for this, which takes a third of a second to read.
        from openai import OpenAI  # noqa: PLC0415

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)  # type: ignore[arg-type]

    def get(self, path: str) -> httpx.Response:
        """The answer of this moment, also if the server keeps answers for a while."""
        return httpx.get(self.url + path, timeout=30, headers=FRESH)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        self._reader.join(timeout=10)
        return code


@pytest.fixture
def start() -> Iterator[Callable[..., Daemon]]:
    """Start daemons that end with the test."""
    started: list[Daemon] = []

    def make(*arguments: str, ready: bool = True, **options: Any) -> Daemon:
        daemon = Daemon(*arguments, **options)
        started.append(daemon)
        if ready:
            daemon.wait_ready()
        return daemon

    yield make
    for daemon in started:
        daemon.stop(signal.SIGKILL)


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A daemon with the embedded model and default settings."""
    served = Daemon(may_fork=False)
    try:
        served.wait_ready()
        yield served
    finally:
        served.stop(signal.SIGKILL)


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints for benchmarks, made once for the tier, because making one imports all of transformers."""
    root = tmp_path_factory.getbasetemp()
    shared = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "shapes"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make: list[str | Path] = [sys.executable, "-P", BENCHMARKS / "checkpoints.py", "--dir", shared, *SHAPES_USED]
        subprocess.run(make, check=True, capture_output=True)
    return shared


def benchmark(program: str, *arguments: str | Path) -> str:
    """Run a benchmark by its path, outside of the checkout. Returns its output."""
    command = [sys.executable, BENCHMARKS / program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
