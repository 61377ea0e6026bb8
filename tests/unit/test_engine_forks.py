"""Engines that another process forks: children of the server like any, with what they were passed and nothing else."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from inferd.engine.api.errors import StartError
from inferd.engine.api.process import engine_forks, engine_process
from inferd.engine.api.process.engine_forks import EarlyProcess, EngineForks
from inferd.engine.api.process.engine_process import EngineProcess
from inferd.engine.api.process.flight_recorder import flight_bytes
from inferd.engine.api.process.heartbeat import HEARTBEAT_BYTES
from tests.configs import engine_config
from tests.unit.test_engine_process import is_alive, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are forked on Linux alone")

FORKER = """
import json, os, socket, sys
from pathlib import Path
from inferd.engine.process import forker
def run():
    launch = json.loads(sys.stdin.readline())
    names = [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
    seen = {name: os.readlink(f"/proc/self/fd/{name}") for name in names if int(name) > 2}
    sizes = [os.fstat(launch[name]).st_size for name in ("heartbeat_fd", "flight_fd")]
    facts = [os.getpid(), os.getppid(), os.getsid(0), sizes, seen]
    Path(launch["run_dir"], "seen").write_text(json.dumps(facts) + "\\n")
    sys.stdin.readline()
    return 7
sys.exit(forker.fork_engines(socket.socket(fileno=int(sys.argv[1])), run))
"""


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineForks]:
    """Engines are small programs."""
    monkeypatch.setattr(engine_forks, "FORKER_COMMAND", (sys.executable, "-P", "-c", FORKER))
    made = EngineForks()
    yield made
    made.close()


def process_of(early: EarlyProcess | None) -> EngineProcess:
    assert early is not None
    process = EngineProcess(engine_config(max_num_seqs=5), early=early)
    process.spawn()
    return process


def seen_by(process: EngineProcess) -> list[object]:
    """Facts that the program writes of itself."""
    file = process.run_dir / "seen"
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    found: list[object] = json.loads(file.read_text())
    return found


def test_an_engine_is_a_child_of_the_server_and_has_what_it_was_passed(forks: EngineForks) -> None:
    """Two run at the same time. None has a descriptor of the other, or of the process that forks them."""
    before = os.listdir("/proc/self/fd")

    async def run_two() -> None:
        both = [process_of(await forks.next()) for _ in range(2)]
        for process in both:
            pid, parent, session, sizes, others = seen_by(process)
            assert (pid, parent, session) == (process.pid, os.getpid(), process.pid)
            assert sizes == [HEARTBEAT_BYTES, flight_bytes(5)]
            assert isinstance(others, dict)
            assert [target.startswith("/memfd:") for target in others.values()] == [True, True], others
        for process in both:
            assert process.is_running
            assert await process.stop() == 7

    asyncio.run(run_two())
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_learns_how_an_engine_ended(number: signal.Signals, forks: EngineForks) -> None:
    async def run() -> None:
        process = process_of(await forks.next())
        seen_by(process)
        assert process.pid is not None
        os.kill(process.pid, number)
        assert await process.news(20.0) == -number
        assert await process.wait() == -number
        process.discard()

    asyncio.run(run())


def test_the_next_engine_needs_nothing_of_the_last(forks: EngineForks) -> None:
    """The server adopts engines alone, and only while one is forked."""

    async def run() -> None:
        for _ in range(3):
            process = process_of(await forks.next())
            seen_by(process)
            process.kill()
            assert await process.wait() == -signal.SIGKILL
            process.discard()

    asyncio.run(run())
    assert {child.pid for child in psutil.Process().children()} & {forks.pid} == {forks.pid}
    orphan = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=True).stdout
    wait_until(lambda: not is_alive(int(orphan)))
    assert int(orphan) not in [child.pid for child in psutil.Process().children()]


ORPHAN = "import os, sys; pid = os.fork(); pid or os.execlp('sleep', 'sleep', '0.1'); print(pid)"


def test_engines_import_their_libraries_once_no_process_forks_them(
    forks: EngineForks, caplog: pytest.LogCaptureFixture
) -> None:
    assert forks.pid is not None
    os.kill(forks.pid, signal.SIGKILL)

    async def ask() -> list[EarlyProcess | None]:
        return [await forks.next() for _ in range(3)]

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(ask()) == [None] * 3
    assert forks.pid is None
    assert [record.message for record in caplog.records if "no longer forked" in record.message] != []
    assert len(caplog.records) == 1, "it says so once"


def test_one_that_does_not_answer_is_killed(
    forks: EngineForks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pid = forks.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(forks, "_timeout_s", 0.2)
    before = os.listdir("/proc/self/fd")
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(forks.next()) is None
    assert not is_alive(pid)
    assert "has not answered for 0.2 s" in caplog.text
    assert len(os.listdir("/proc/self/fd")) < len(before), "its socket and its input are closed"


def test_a_fork_that_the_system_refuses_leaves_a_plain_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = "import errno, os\ndef fork(): raise OSError(errno.EAGAIN, 'no')\nos.fork = fork\n"
    monkeypatch.setattr(engine_forks, "FORKER_COMMAND", (sys.executable, "-P", "-c", refusing + FORKER))
    forks = EngineForks()
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(forks.next()) is None
    assert os.strerror(11) in caplog.text
    forks.close()


def test_one_with_threads_forks_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A fork has one thread alone, so libraries that wait for others would wait for ever."""
    threads = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    monkeypatch.setattr(engine_forks, "FORKER_COMMAND", (sys.executable, "-P", "-c", threads + FORKER))
    forks = EngineForks()
    assert asyncio.run(forks.next()) is None
    assert "libraries have started 1 threads" in capfd.readouterr().err
    forks.close()


def test_a_cancelled_request_leaves_nothing(forks: EngineForks) -> None:
    assert forks.pid is not None
    os.kill(forks.pid, signal.SIGSTOP)
    before = os.listdir("/proc/self/fd")

    async def give_up() -> None:
        asking = asyncio.create_task(forks.next())
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait((asking,))

    asyncio.run(give_up())
    assert len(os.listdir("/proc/self/fd")) == len(before)
    os.kill(forks.pid, signal.SIGCONT)

    async def go_on() -> None:
        process = process_of(await forks.next())
        seen_by(process)
        assert await process.stop() == 7

    asyncio.run(go_on())


SERVER = """
import asyncio, sys, time
from inferd.engine.api.process.engine_forks import EngineForks
forks = EngineForks()
early = asyncio.run(forks.next())
print(forks.pid, early.pid, flush=True)
time.sleep(600)
"""


def test_the_real_one_forks_engines_and_ends_with_the_server_even_if_it_is_stopped() -> None:
    """An engine that it forked ends too. It shows the command line of an engine."""
    server = subprocess.Popen([sys.executable, "-P", "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    forker, engine = map(int, server.stdout.readline().split())
    commands = {pid: psutil.Process(pid).cmdline() for pid in (forker, engine)}
    assert [words[3] for words in commands.values()] == ["inferd.engine.process.forker", "inferd.engine.process.boot"]
    assert len(os.listdir(f"/proc/{forker}/task")) == 1, "its libraries have started threads"
    os.kill(forker, signal.SIGSTOP)
    server.kill()
    server.wait()
    wait_until(lambda: not is_alive(forker) and not is_alive(engine))


@pytest.mark.parametrize("why", ["other command", "gpu"])
def test_where_nothing_is_forked_the_first_engine_is_started_early(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = (sys.executable, "-c", "import sys; sys.stdin.read()")
    monkeypatch.setattr(engine_process, "ENGINE_COMMAND", stub)
    if why == "gpu":
        monkeypatch.setattr(engine_forks, "_ENGINE_COMMAND", stub)
        monkeypatch.setattr(engine_forks.gpu, "detect", lambda: None)
    forks = EngineForks()
    assert forks.pid is None

    async def two() -> tuple[EarlyProcess | None, EarlyProcess | None]:
        return await forks.next(), await forks.next()

    early, later = asyncio.run(two())
    assert early is not None and later is None
    pid = early.pid
    early.close()
    assert pid is not None and not is_alive(pid)


def test_without_descriptors_there_is_no_engine(forks: EngineForks, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "pipe", refuse)
    with pytest.raises(StartError, match="cannot start the engine process: Too many open files"):
        asyncio.run(forks.next())
    assert len(os.listdir("/proc/self/fd")) == len(before)
