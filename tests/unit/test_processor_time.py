"""`ProcessorTime` of processes that spin, sleep, are stopped, wait for a lock, and wait for a processor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from inferd.engine.api.process.processor_time import ProcessorTime, ProcessorUse
from tests.unit.test_process_supervisor import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")

SPIN = "while True: pass"


@contextlib.contextmanager
def running(code: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen((sys.executable, "-c", code), start_new_session=True, **options) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_kernel_tells_stopped_from_asleep_from_running() -> None:
    with running(SPIN) as spins, running("import time; time.sleep(1000)") as sleeps:
        busy, idle = ProcessorTime(spins.pid), ProcessorTime(sleeps.pid)
        assert idle.use() == ProcessorUse(), "the first look has nothing to compare with"
        wait_until(lambda: idle.use().is_asleep)
        busy.use()
        wait_until(lambda: busy.use().ran_s > 0.0)
        assert not busy.use().is_asleep and not busy.is_stopped()
        spins.send_signal(signal.SIGSTOP)
        wait_until(busy.is_stopped)
        assert not idle.is_stopped()
    assert not busy.is_stopped() and busy.use().share == 1.0, "it has ended"


def test_the_kernel_tells_a_starved_process_from_one_that_waits_for_a_lock() -> None:
    """A process of the least priority shares one core with busy ones: it uses hardly any of its time, and a process
    that waits for a lock could use all of it. What a process has started counts with it."""
    core = {min(os.sched_getaffinity(0))}

    def pinned(nice: int) -> Callable[[], None]:
        return lambda: (os.sched_setaffinity(0, core), os.nice(nice), None)[-1]

    parent = f"import subprocess, sys; subprocess.run((sys.executable, '-c', {SPIN!r}))"
    lock = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
    with contextlib.ExitStack() as all_of_them:
        for _ in range(4):
            # All in one session: the kernel weighs sessions before the processes in one.
            all_of_them.enter_context(subprocess.Popen((sys.executable, "-c", SPIN), preexec_fn=pinned(0)))
        starved = all_of_them.enter_context(subprocess.Popen((sys.executable, "-c", parent), preexec_fn=pinned(19)))
        locked = all_of_them.enter_context(subprocess.Popen((sys.executable, "-c", lock)))
        started = psutil.Process().children(recursive=True)
        all_of_them.callback(lambda: [each.kill() for each in {*started, *psutil.Process().children(recursive=True)}])
        wait_until(lambda: psutil.Process(starved.pid).children(), 60.0)
        of_starved, of_locked = ProcessorTime(starved.pid), ProcessorTime(locked.pid)
        wait_until(lambda: of_locked.use().is_asleep)
        of_starved.use()
        uses = []
        wait_until(lambda: uses.append(of_starved.use()) or sum(use.passed_s for use in uses) > 1.0)  # type: ignore[func-returns-value]
        ran_s, waited_s = sum(use.ran_s for use in uses), sum(use.waited_s for use in uses)
        assert waited_s > 0.5 and ran_s < 0.5 * waited_s
        use = of_locked.use()
        assert use.share == 1.0 and use.is_asleep
