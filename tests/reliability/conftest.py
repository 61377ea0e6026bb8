"""Daemons whose engines are made to die, and the switch for the long form of a test."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.e2e.conftest import Daemon, children, is_engine, start

__all__ = ["start"]

WITHOUT_CACHE = "--no-prefix-caching"
"""Flags without a prefix cache. A new engine's cache is empty, so the usage would depend on when the last one died."""


_POLL_S = 0.1
"""Seconds between two reads of the metrics. One takes 6 ms of processor time."""
HTTP = httpx.Client(verify=False, timeout=30)
"""One client for all requests. Making one takes 20 ms of processor time, which the engines need."""


def faulty(*faults: str, step_ms: float | None = None) -> tuple[str, ...]:
    """The program of a daemon whose engines have these faults (`faulty_engine`): with a free model if `step_ms` is
    given, else with the real one."""
    program = [sys.executable, "-P", str(Path(__file__).with_name("faulty_server.py"))]
    free = [] if step_ms is None else ["--step-ms", str(step_ms)]
    return (*program, *(f"--fault={fault}" for fault in faults), *free)


def wait_until(fact: Callable[[], bool], within_s: float = 60.0, what: str = "it") -> None:
    """Poll until the condition is true. The time limit mostly keeps a broken test from hanging."""
    deadline = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(_POLL_S)


def count(daemon: Daemon, name: str) -> float:
    """A sample of the metrics page."""
    page = HTTP.get(daemon.url + "/metrics").text
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def restarts(daemon: Daemon) -> int:
    """Number of engines that replaced a dead one."""
    return int(HTTP.get(daemon.url + "/state").json()["restarts"])


def engines(daemon: Daemon) -> list[int]:
    """Process ids of the engine and then of its standby, the oldest first."""
    return [pid for pid, command in children(daemon.process.pid).items() if is_engine(command)]


def kill_engine(daemon: Daemon, number: signal.Signals = signal.SIGKILL) -> float:
    """Send the engine a signal. Returns the time of it."""
    os.kill(daemon.engine_pid, number)
    return time.monotonic()
