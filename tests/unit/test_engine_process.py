"""An engine process and its handle: nothing that it started outlives it, and a pulse can be read without asking."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from inferd.engine.api.errors import StartError
from inferd.engine.api.process.engine_forks import EarlyProcess
from inferd.engine.api.process.engine_process import IMPORT_FIRST, EngineProcess, describe_exit
from inferd.engine.api.process.flight_recorder import flight_bytes
from inferd.engine.api.process.heartbeat import HEARTBEAT_BYTES, EnginePhase, Heartbeat, HeartbeatReader, Pulse
from inferd.engine.api.process.shared_memory import allocate, open_map
from inferd.engine.api.wire.client import EngineClient
from tests.configs import engine_config

CONFIG = engine_config()


def wait_until(true: object, within_s: float = 20.0) -> None:
    """Poll a condition; the bound only keeps a broken test from hanging."""
    deadline = time.monotonic() + within_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never became true"
        os.sched_yield()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Let `spawn` start a small program instead of an engine."""
    program = ["import sys; sys.stdin.read()"]
    real = subprocess.Popen

    def popen(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        return real([sys.executable, "-c", program[0]], **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr("inferd.engine.api.process.engine_process.subprocess.Popen", popen)
    return program


def test_closing_its_input_ends_the_child(stub: list[str]) -> None:
    process = EngineProcess(CONFIG)
    assert process.run_dir.stat().st_mode & 0o777 == 0o700
    process.spawn()
    assert asyncio.run(process.stop()) == 0
    assert not process.run_dir.exists()


def test_a_child_that_ignores_everything_is_killed(stub: list[str]) -> None:
    stub[0] = STUBBORN
    process = EngineProcess(CONFIG)
    process.spawn()
    assert asyncio.run(process.stop(grace_s=0.3)) in (-signal.SIGKILL, -signal.SIGTERM)


def test_what_a_hung_child_started_ends_with_it(stub: list[str], tmp_path: Path) -> None:
    written = tmp_path / "pid"
    stub[0] = f"import os, pathlib, time; pid = os.fork(); pathlib.Path({str(written)!r}).write_text(str(pid)) if pid "
    stub[0] += "else None; time.sleep(300)"
    process = EngineProcess(CONFIG)
    process.spawn()
    wait_until(lambda: written.exists() and written.read_text())
    process.kill()
    wait_until(lambda: not is_alive(int(written.read_text())))
    process.discard()


def test_wait_sees_a_death(stub: list[str]) -> None:
    stub[0] = "raise SystemExit(9)"
    process = EngineProcess(CONFIG)
    process.spawn()
    assert asyncio.run(process.wait()) == 9
    process.discard()


def test_one_that_dies_before_it_is_promoted_leaves_nothing_to_write(stub: list[str]) -> None:
    stub[0] = "import sys; sys.stdin.buffer.raw.readline()"
    process = EngineProcess(CONFIG)
    process.spawn()
    wait_until(lambda: not process.is_running)
    process.promote()
    process.discard()


HOLDS_LOCK = """
import ctypes, json, os, pathlib, platform, signal, sys, threading, time
from inferd.engine.api.process.death_notice import hold_lock
from inferd.engine.api.process.heartbeat import LOCK_OFFSET
launch = json.loads(sys.stdin.readline())
hold_lock(launch["heartbeat_fd"], LOCK_OFFSET)
pathlib.Path(launch["run_dir"], "held").touch()
sys.stdin.readline()
"""
_EXIT = "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[platform.machine()], 3)"


def connected(program: str, stub: list[str]) -> EngineProcess:
    """An engine process whose child holds its lock and then waits for a line."""
    stub[0] = HOLDS_LOCK + program
    process = EngineProcess(CONFIG)
    process.spawn()
    wait_until((process.run_dir / "held").exists)
    return process


def test_a_death_is_seen_though_no_more_files_may_be_open(stub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for news takes as long as it was asked to: the watchdog counts in looks."""

    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    stub[0] = "import sys; [sys.stdin.readline() for _ in range(2)]; raise SystemExit(9)"
    process = EngineProcess(CONFIG)
    process.spawn()

    async def see_it_die() -> None:
        began_s = time.monotonic()
        assert await process.news(0.15) is None
        assert time.monotonic() - began_s >= 0.15
        process.promote()
        assert await process.news(20.0) == 9
        assert await process.wait() == 9

    asyncio.run(see_it_die())
    process.discard()


def test_a_death_is_seen_though_no_more_threads_may_run(stub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    process = connected("raise SystemExit(9)", stub)

    async def see_it_die() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            process.connected()
        process.promote()
        assert await process.news(20.0) == 9

    asyncio.run(see_it_die())
    process.discard()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such locks")
def test_a_death_is_noticed_before_all_of_the_child_is_gone(stub: list[str]) -> None:
    """Here its main thread ends by the system call, and another one keeps the process there."""
    process = connected(f"threading.Thread(target=time.sleep, args=(60,)).start(); {_EXIT}", stub)

    async def see_it_die() -> None:
        process.connected()
        assert not process.has_exited and process.is_running
        process.promote()
        assert await process.news(20.0) == 3
        assert process.has_exited and not process.is_running
        assert process._process is not None and process._process.poll() is None, "it is gone"
        process.kill()
        assert await process.wait() == -signal.SIGKILL

    asyncio.run(see_it_die())
    process.discard()


@pytest.mark.parametrize("has_locks", [sys.platform == "linux", False])
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.kill(0, signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os._exit(9)", 9),
        ("os._exit(0)", 0),
        ("sys.exit(3)", 3),
    ],
)
def test_a_death_has_the_code_that_the_system_reports(
    end: str, code: int, has_locks: bool, stub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.engine.api.process.death_notice._IS_SUPPORTED", has_locks)
    before = threading.active_count()
    process = connected(end, stub)

    async def see_it_die() -> None:
        process.connected()
        assert threading.active_count() == before + has_locks
        process.promote()
        assert await process.news(20.0) == code
        assert await process.wait() == code

    asyncio.run(see_it_die())
    process.discard()
    wait_until(lambda: threading.active_count() == before, within_s=5.0)  # less than the thread waits in vain


def test_a_child_that_never_held_its_lock_gives_no_notice(stub: list[str]) -> None:
    process = EngineProcess(CONFIG)
    process.spawn()
    before = threading.active_count()

    async def stop() -> int:
        process.connected()
        wait_until(lambda: threading.active_count() == before)
        assert process.is_running
        return await process.stop()

    assert asyncio.run(stop()) == 0


@pytest.mark.parametrize("maker", ["zmq.Socket", "zmq.asyncio.Context.socket"])
def test_without_files_for_sockets_there_is_no_engine(
    maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(maker, refuse)

    async def make() -> None:
        with pytest.raises(StartError, match="Too many open files; let this process open more"):
            EngineClient(tmp_path, 0)

    asyncio.run(make())


def test_exits_in_words() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-9) == "was killed by SIGKILL"


def test_the_engine_dies_with_its_server() -> None:
    """After kill -9 of the parent the real engine process reads the end of its input, at any point of its start."""
    parent = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-c",
            "from inferd.engine.api.process.engine_process import EngineProcess\n"
            "from inferd.engine.api.config import EngineConfig\n"
            "import msgspec, time\n"
            f"s = EngineProcess(msgspec.json.decode({msgspec.json.encode(CONFIG)!r}, type=EngineConfig))\n"
            "s.spawn(); print(s.pid, s.run_dir, flush=True); time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid, run_dir = parent.stdout.readline().split()
    assert is_alive(int(pid))
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(int(pid)))
    assert not Path(run_dir).exists()


def test_a_pulse_is_read_without_asking() -> None:
    shared = allocate(HEARTBEAT_BYTES)
    reader = HeartbeatReader(shared)
    assert reader.read() is None
    heartbeat = Heartbeat.of(shared)
    os.close(shared)
    assert reader.read() == Pulse(1, 0.0, 0.0, 0, EnginePhase.LOADING, False)
    heartbeat.phase, heartbeat.has_work, heartbeat.num_steps = EnginePhase.SERVING, True, 7
    heartbeat.step_started_s, heartbeat.step_limit_s = 1.5, 2.5
    heartbeat.num_frames_sent, heartbeat.num_frames_received = 2**40, 3
    heartbeat.num_beats += 1
    assert reader.read() == Pulse(2, 1.5, 2.5, 7, EnginePhase.SERVING, True, 2**40, 3)
    reader.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
@pytest.mark.parametrize("num_bytes", [HEARTBEAT_BYTES, flight_bytes(65_536)])
def test_shared_memory_is_there_from_the_start_and_lies_in_no_directory(num_bytes: int) -> None:
    """A page that must be allocated later would end the server by SIGBUS if memory is short."""
    shared = allocate(num_bytes)
    try:
        about = os.fstat(shared)
        assert about.st_size == num_bytes
        assert about.st_blocks * 512 >= num_bytes, "it has holes"
        assert os.readlink(f"/proc/self/fd/{shared}").startswith("/memfd:")
        assert not os.get_inheritable(shared)
        assert open_map(shared)[:] == bytes(num_bytes)
    finally:
        os.close(shared)


def test_no_descriptor_is_left(stub: list[str]) -> None:
    """Holds for engines that started, that failed to start, and that were never started."""
    stub[0] = "import sys; sys.stdin.read()"

    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def live() -> None:
        process = EngineProcess(CONFIG)
        process.spawn()
        await process.stop()

    asyncio.run(live())
    before = num_open()
    for _ in range(3):
        asyncio.run(live())
        EngineProcess(CONFIG).discard()
    assert num_open() == before


def test_an_early_process_becomes_the_engine(stub: list[str], tmp_path: Path) -> None:
    written = tmp_path / "seen"
    stub[0] = (
        "import json, os, pathlib, sys\n"
        "first, launch = sys.stdin.readline(), json.loads(sys.stdin.readline())\n"
        "sizes = [os.fstat(launch[name]).st_size for name in ('heartbeat_fd', 'flight_fd')]\n"
        f"part = pathlib.Path({str(tmp_path / 'part')!r}); part.write_text(json.dumps([first, os.getpid(), sizes]))\n"
        f"part.rename({str(written)!r})\n"
        "sys.stdin.read()"
    )
    before = os.listdir("/proc/self/fd")
    early = EarlyProcess.start()
    process = EngineProcess(engine_config(max_num_seqs=5), early=early)
    early.close()  # does nothing, because the process was taken over
    process.spawn()
    wait_until(written.exists)
    first, pid, sizes = json.loads(written.read_text())
    assert (first.encode(), pid, sizes) == (IMPORT_FIRST, process.pid, [HEARTBEAT_BYTES, flight_bytes(5)])
    assert asyncio.run(process.stop()) == 0
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_an_early_process_that_nobody_takes_over_is_killed(stub: list[str]) -> None:
    stub[0] = STUBBORN
    before = os.listdir("/proc/self/fd")
    early = EarlyProcess.start()
    process = early._process
    assert process is not None and is_alive(process.pid)
    early.close()
    assert not is_alive(process.pid)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_an_early_process_ends_with_the_engine_process_that_has_no_memory(
    stub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = EarlyProcess.start()
    process = early._process
    assert process is not None

    def fail(descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("inferd.engine.api.process.engine_process.fill", fail)
    with pytest.raises(StartError, match="No space left"):
        EngineProcess(CONFIG, early=early)
    assert not is_alive(process.pid)


def test_an_engine_has_what_it_was_passed_and_nothing_else(stub: list[str], tmp_path: Path) -> None:
    written = tmp_path / "seen"
    stub[0] = (
        "import json, os, pathlib, sys\n"
        "launch = json.loads(sys.stdin.readline())\n"
        "fds = sorted(int(name) for name in os.listdir('/proc/self/fd'))\n"
        "shared = [launch['heartbeat_fd'], launch['flight_fd']]\n"
        "seen = [[os.fstat(fd).st_size for fd in shared], [fd for fd in fds if fd > 2 and fd not in shared]]\n"
        f"part = pathlib.Path({str(tmp_path / 'part')!r}); part.write_text(json.dumps(seen))\n"
        f"part.rename({str(written)!r})\n"
        "sys.stdin.read()"
    )
    process = EngineProcess(engine_config(max_num_seqs=5))
    process.spawn()
    wait_until(written.exists)
    process.discard()
    sizes, others = json.loads(written.read_text())
    assert sizes == [HEARTBEAT_BYTES, flight_bytes(5)]
    assert len(others) == 1, "the directory that was listed"
