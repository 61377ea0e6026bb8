"""`ProcessorTime` of processes that spin, sleep, are stopped, wait for a lock, and wait for a processor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from inferd.engine.api.process.heartbeat import EnginePhase, Pulse
from inferd.engine.api.process.processor_time import LEAST_SHARE, ProcessorTime, ProcessorUse
from inferd.engine.api.wire.client import FrameCounts
from inferd.server.supervision.watchdog import TICK_S, Watchdog
from tests.unit.test_engine_process import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")

SPIN = "while True: pass"


@contextlib.contextmanager
def running(code: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen((sys.executable, "-c", code), start_new_session=True, **options) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_told(told: Callable[[], bool]) -> None:
    """Wait until it is true of a time that is long enough to say anything."""
    pause = threading.Event()
    wait_until(lambda: not pause.wait(0.2) and told(), 60.0)


def test_the_kernel_tells_stopped_from_asleep_from_running() -> None:
    with running(SPIN) as spins, running("import time; time.sleep(1000)") as sleeps:
        busy, idle = ProcessorTime(spins.pid), ProcessorTime(sleeps.pid)
        assert idle.use() == ProcessorUse(), "the first look has nothing to compare with"
        wait_until_told(lambda: idle.use().is_asleep)
        wait_until_told(lambda: not busy.use().is_asleep)
        assert not busy.is_stopped()
        spins.send_signal(signal.SIGSTOP)
        wait_until(busy.is_stopped)
        assert not idle.is_stopped()
    assert not busy.is_stopped() and busy.use() == ProcessorUse(), "it has ended"


def test_a_process_that_looks_at_itself_and_slept_waited_for_no_processor() -> None:
    """The thread that looks is running, so the time before is not a wait for a processor. Its
    children count only for a caller that asks for it."""
    with running(SPIN):
        alone = ProcessorTime(os.getpid(), has_family=False)
        alone.use()
        wait_until_told(lambda: alone.use().share > 0.5)
        family = ProcessorTime(os.getpid())
        family.use()
        wait_until_told(lambda: not family.use().is_asleep)


def test_a_kernel_that_tells_nothing_says_that_a_process_runs(tmp_path: Path) -> None:
    unknown = ProcessorTime(os.getpid())
    unknown._folder = tmp_path
    for _ in range(2):
        assert unknown.use() == ProcessorUse(1.0, is_asleep=False) and not unknown.is_stopped()


def test_the_kernel_tells_a_starved_process_from_one_that_waits_for_a_lock() -> None:
    """A process of the least priority shares one core with busy ones: it uses hardly any of its time, and a process
    that waits for a lock could use all of it. The time of a process that it started counts, and hides no wait."""
    core = {min(os.sched_getaffinity(0))}

    def pin() -> None:
        os.sched_setaffinity(0, core)

    parent = f"import subprocess, sys; subprocess.run((sys.executable, '-c', {SPIN!r}))"
    lock = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
    others = {child.pid for child in psutil.Process().children()}  # a daemon that other tests share may be among them
    with contextlib.ExitStack() as all_of_them:
        # All in one session: the kernel weighs sessions before the processes in one.
        starved = all_of_them.enter_context(subprocess.Popen((sys.executable, "-c", parent), preexec_fn=pin))
        locked = all_of_them.enter_context(subprocess.Popen((sys.executable, "-c", lock)))
        wait_until(lambda: psutil.Process(starved.pid).children(), 60.0)
        for pid in (starved.pid, psutil.Process(starved.pid).children()[0].pid):
            os.setpriority(os.PRIO_PROCESS, pid, 19)  # not before they have started, which would take long
        for _ in range(4):
            all_of_them.enter_context(subprocess.Popen((sys.executable, "-c", SPIN), preexec_fn=pin))

        def kill_own() -> None:
            for child in psutil.Process().children():
                if child.pid not in others:
                    for process in (*child.children(recursive=True), child):
                        process.kill()

        all_of_them.callback(kill_own)
        of_starved, of_locked = ProcessorTime(starved.pid), ProcessorTime(locked.pid)
        wait_until_told(lambda: of_locked.use().is_asleep)
        of_starved.use()
        wait_until_told(lambda: LEAST_SHARE <= of_starved.use().share < 0.5)
        wait_until_told(lambda: of_locked.use() == ProcessorUse(1.0, is_asleep=True))


def test_the_watchdog_finds_a_lost_frame_of_idle_processes() -> None:
    """With the kernel's own words on both. Only the watchdog's clock is faster. It takes longer on a busy machine."""
    with running("import time; time.sleep(1000)") as sleeps:
        watchdog = Watchdog(0.0, ProcessorTime(sleeps.pid), ProcessorTime(os.getpid(), has_family=False))
        pause = threading.Event()
        for tick in range(1, 2000):
            pulse = Pulse(tick // 4, 0.0, 0.0, 0, EnginePhase.SERVING, False, num_frames_sent=5)
            reason = watchdog.look(pulse, tick * TICK_S, FrameCounts(0, 4, True))
            if reason:
                assert reason == "has sent frame 4, which never came"
                return
            pause.wait(0.02)
        raise AssertionError("the lost frame was never noticed")
