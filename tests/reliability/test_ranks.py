"""An engine whose ranks are processes answers as one process does, and is replaced when any rank dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from inferd.engine.api.machine.cpu import num_cpus
from tests.e2e.conftest import Daemon, children
from tests.reliability.asking import Asker, asked_under
from tests.reliability.conftest import WITHOUT_CACHE, count, restarts, wait_until
from tests.reliability.workloads import mixed, streams

pytestmark = pytest.mark.skipif(num_cpus() < 2, reason="two ranks need two cores")

RANKS = ("--num-threads", "2", "--tensor-parallel-size", "2")


def ranks(daemon: Daemon) -> list[int]:
    """Process ids of the engine's other ranks."""
    return [pid for pid, command in children(daemon.engine_pid).items() if "inferd.engine.process.rank" in command]


def test_a_rank_that_dies_is_a_pause(start: Callable[..., Daemon]) -> None:
    asks = mixed(0)
    alone = start(WITHOUT_CACHE)
    expected = Asker(alone.url).ask(asks)
    assert all(answer.status == 200 and not answer.error for answer in expected)
    alone.stop()

    daemon = start(WITHOUT_CACHE, *RANKS)
    assert ", 2 ranks, context" in daemon.output
    assert daemon.get("/state").json()["engine"]["device"].startswith("2 ranks, each cpu, 1 thread")
    asker = Asker(daemon.url)
    assert [answer.said for answer in asker.ask(asks)] == [answer.said for answer in expected]

    (rank,), engine = ranks(daemon), daemon.engine_pid

    def kill_rank() -> None:
        goal = count(daemon, "inferd_generation_tokens_total") + 200
        wait_until(lambda: count(daemon, "inferd_generation_tokens_total") >= goal)
        os.kill(rank, signal.SIGKILL)

    answers = asked_under(kill_rank, asker, asks)
    assert [answer.said for answer in answers] == [answer.said for answer in expected]
    wait_until(lambda: restarts(daemon) == 1)
    assert "rank 1 was killed by SIGKILL: the engine ends with it" in daemon.output
    assert count(daemon, "inferd_requests_replayed_total") > 0, "the kill hit nobody"
    assert not psutil.pid_exists(engine)

    left = [daemon.engine_pid, *ranks(daemon)]
    assert len(left) == 2
    daemon.stop(signal.SIGKILL)
    wait_until(lambda: not any(map(psutil.pid_exists, left)), 3.0, "the end of all ranks")


@pytest.mark.long
def test_a_rank_that_hangs_is_a_pause(start: Callable[..., Daemon]) -> None:
    """The engine's step does not end, because rank 0 waits for the stopped rank."""
    asks = streams(4, 300)
    daemon = start(WITHOUT_CACHE, *RANKS)
    asker = Asker(daemon.url)
    expected = asker.ask(asks)
    (rank,) = ranks(daemon)

    def stop_rank() -> None:
        goal = count(daemon, "inferd_generation_tokens_total") + 200
        wait_until(lambda: count(daemon, "inferd_generation_tokens_total") >= goal)
        os.kill(rank, signal.SIGSTOP)

    answers = asked_under(stop_rank, asker, asks)
    assert [answer.said for answer in answers] == [answer.said for answer in expected]
    assert restarts(daemon) == 1
    assert "has not ended a step" in daemon.output
    assert not psutil.pid_exists(rank)
