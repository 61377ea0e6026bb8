"""Daemons whose engines are made to die, and whether a test runs whole."""

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
"""A new engine's prefix cache is empty: what usage says of hits would depend on when the last one died."""


_POLL_S = 0.1
"""A look at the metrics takes 6 ms of processor time."""
HTTP = httpx.Client(verify=False, timeout=30)
"""One for all questions: to make one takes 20 ms of processor time, which the engines need."""


def faulty(*faults: str, step_ms: float | None = None) -> tuple[str, ...]:
    """The program of a daemon whose engines have these faults (`faulty_engine`): with a free model if `step_ms` is
    given, else with the real one."""
    program = [sys.executable, "-P", str(Path(__file__).with_name("faulty_server.py"))]
    free = [] if step_ms is None else ["--step-ms", str(step_ms)]
    return (*program, *(f"--fault={fault}" for fault in faults), *free)


def wait_until(fact: Callable[[], bool], within_s: float = 60.0, what: str = "it") -> None:
    """Poll; the bound mostly keeps a broken test from hanging."""
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
    """Engines that replaced one that died."""
    return int(HTTP.get(daemon.url + "/state").json()["restarts"])


def engines(daemon: Daemon) -> list[int]:
    """Its engine's process and, behind it, that of a standby; the oldest first."""
    return [pid for pid, command in children(daemon.process.pid).items() if is_engine(command)]


def kill_engine(daemon: Daemon, number: signal.Signals = signal.SIGKILL) -> float:
    """Signal the engine; returns when."""
    os.kill(daemon.engine_pid, number)
    return time.monotonic()
