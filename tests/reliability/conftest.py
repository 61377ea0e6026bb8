"""Daemons whose engines are made to die, and the switch for the long form of a test."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median, quantiles

import httpx

from inferd.engine.api.process.logs import counted
from tests.conftest import FRESH
from tests.e2e.conftest import Daemon, children, is_engine, start
from tests.reliability.asking import Asker, asked_under, pauses_s
from tests.reliability.workloads import streams

__all__ = ["start"]

WITHOUT_CACHE = "--no-prefix-caching"
"""Flags without a prefix cache. A new engine's cache is empty, so the usage would depend on when the last one died."""


NUM_STREAMS, NUM_TOKENS, MAX_TRIES = 64, 80, 5
"""Streams of each round of R2, their tokens, and the rounds whose kill may come too late."""
_POLL_S = 0.1
"""Seconds between two reads of the metrics. One takes 2 ms of processor time."""
HTTP = httpx.Client(verify=False, timeout=30, headers=FRESH)
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


def show_pauses(
    daemon: Daemon,
    engines: str,
    *,
    num_kills: int = 1,
    least_moved: float = NUM_STREAMS / 2,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """R2: kill an engine under streams, so many times, and compare all answers with those of an undisturbed run. Prints
    the pauses, which only benchmarks bound.

    `least_moved`: requests that must be sent again for a kill to count. `around` is entered for each round.
    """
    asks, asker = streams(NUM_STREAMS, NUM_TOKENS), Asker(daemon.url)
    expected = asker.ask(asks)
    killed_s, pauses = list[float](), list[list[float]]()
    num_restarts = restarts(daemon)

    def kill() -> None:
        goal = count(daemon, "inferd_generation_tokens_total") + 10 * NUM_STREAMS
        wait_until(lambda: count(daemon, "inferd_generation_tokens_total") >= goal)
        killed_s.append(kill_engine(daemon))

    while len(pauses) < num_kills:
        assert len(killed_s) < num_kills - 1 + MAX_TRIES, "no kill came in time"
        num_moved = count(daemon, "inferd_requests_replayed_total")
        with around():
            answers = asked_under(kill, asker, asks)
            assert [answer.said for answer in answers] == [answer.said for answer in expected]
            try:
                wait_until(lambda: restarts(daemon) == num_restarts + len(killed_s))
            except AssertionError as error:
                told = f"{restarts(daemon) - num_restarts:g} restarts after {len(killed_s)} kills"
                raise AssertionError(f"{told}\n{daemon.output[-10_000:]}") from error
        # On a busy machine the kill may come when all is answered.
        if count(daemon, "inferd_requests_replayed_total") - num_moved >= least_moved:
            pauses.append(pauses_s(answers, killed_s[-1]))
    print(
        f"R2 with {engines}: {counted(num_kills, 'kill')} under {NUM_STREAMS} streams, from a kill to the next token:"
    )
    all_pauses = [pause for each in pauses for pause in each]
    for which, found in (("each stream", all_pauses), ("the last stream of a kill", list(map(max, pauses)))):
        p95 = quantiles(found, n=20, method="inclusive")[-1] if len(found) > 1 else found[0]
        print(f"  {which}: median {median(found):.2f} s, p95 {p95:.2f} s, worst {max(found):.2f} s")
