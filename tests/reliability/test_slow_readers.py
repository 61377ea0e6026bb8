"""R12: clients that hardly read their streams do not delay generation, increase memory, or affect others."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import quantiles

import psutil
import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import Daemon
from tests.reliability.asking import Answer, Asker
from tests.reliability.conftest import WITHOUT_CACHE, wait_until
from tests.reliability.test_disconnects import finished
from tests.reliability.workloads import streams

SHORT_READERS, LONG_READERS = 24, 1_000
MAX_RSS_GROWTH = 100 * 2**20
TOKENS = 250
ROUNDS = 41
"""Rounds of the long form, with slow readers and without. The p99 of a single round depends on a few gaps."""
BODY = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "logprobs": 5}


@contextmanager
def running() -> Iterator[Daemon]:
    served = Daemon(WITHOUT_CACHE, "--no-access-log", may_fork=False)
    try:
        served.wait_ready()
        yield served
    finally:
        served.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running() as served:
        yield served


class SlowReaders:
    """Streams that begin at once, and that another process reads at one byte per second."""

    def __init__(self, daemon: Daemon, num_readers: int, held: ExitStack) -> None:
        command = [sys.executable, "-m", "tests.reliability.slow_readers", daemon.url, str(num_readers)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        held.callback(self._process.kill)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(BODY) + "\n")

    def read_all(self) -> int:
        """Reads the rest of every stream quickly. Returns how many streams were complete."""
        asked, num_whole = self._process.communicate(timeout=300)[0].split()
        assert asked == "asked"
        return int(num_whole)


def said(answers: list[Answer]) -> list[tuple[object, ...]]:
    return [answer.said for answer in answers]


class Others:
    """Four quick clients for each of some servers. They take turns, because a machine's speed changes over minutes."""

    def __init__(self, daemons: dict[str, Daemon], num_rounds: int) -> None:
        self._askers = {whose: Asker(daemon.url) for whose, daemon in daemons.items()}
        self._num_rounds, self._asks = num_rounds, streams(4, 200)
        self._expected, *_ = [said(asker.ask(self._asks)) for asker in self._askers.values()]

    def pace(self, when: str) -> None:
        """Prints the time between two tokens of a stream."""
        gaps_ms: dict[str, list[float]] = {whose: [] for whose in self._askers}
        for _ in range(self._num_rounds):
            for whose, asker in self._askers.items():
                answers = asker.ask(self._asks)
                assert said(answers) == self._expected
                gaps_ms[whose] += [1e3 * gap for answer in answers for gap in answer.gaps_s]
        for whose, gaps in gaps_ms.items():
            percentiles = quantiles(gaps, n=100)
            print(
                f"R12: {when}, {whose}: ITL p50 {percentiles[49]:.2f} ms, p99 {percentiles[98]:.2f} ms of {len(gaps)}"
            )


def test_r12_slow_readers_cost_little_and_others_nothing(daemon: Daemon, is_long: bool) -> None:
    num_readers = LONG_READERS if is_long else SHORT_READERS
    process = psutil.Process(daemon.process.pid)
    with ExitStack() as held:
        daemons = {"the server with slow readers": daemon}
        if is_long:
            daemons["another without"] = held.enter_context(running())
        others = Others(daemons, ROUNDS if is_long else 1)
        others.pace("before they come")
        before, done = process.memory_info().rss, finished(daemon, "length")
        readers = SlowReaders(daemon, num_readers, held)
        # Generation goes on at its own pace: every choice ends, though hardly a byte was read.
        wait_until(lambda: finished(daemon, "length") == done + num_readers, 240, "the slow readers' answers")
        state = daemon.get("/state").json()
        assert (state["requests"], state["kv_cache"]["used"]) == ({"running": 0, "waiting": 0}, 0)
        others.pace("while they read")
        grown = process.memory_info().rss - before
        print(f"R12: {num_readers} readers at 1 B/s: RSS +{grown / 2**20:.1f} MiB")
        assert grown < MAX_RSS_GROWTH
        began = time.monotonic()
        assert readers.read_all() == num_readers, "a stream was not whole"
        print(f"R12: all of it read {time.monotonic() - began:.1f} s later, nothing lost")
