"""An engine whose ranks are processes answers as one process does. If any rank dies or hangs, a standby with as many
ranks takes its place. A drain ends all of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from inferd.engine.api.machine.cpu import num_cpus
from tests.e2e.conftest import Daemon, children
from tests.reliability.asking import Answer, Asker, asked_under
from tests.reliability.conftest import WITHOUT_CACHE, count, engines, restarts, wait_until
from tests.reliability.workloads import mixed, streams

pytestmark = pytest.mark.skipif(num_cpus() < 2, reason="two ranks need two cores")

RANKS = ("--num-threads", "2", "--tensor-parallel-size", "2")
FAULTS = {
    "rank 0 dies": (0, signal.SIGKILL, "the engine process was killed by SIGKILL"),
    "rank 1 dies": (1, signal.SIGKILL, "rank 1 was killed by SIGKILL: the engine ends with it"),
    "rank 0 stops": (0, signal.SIGSTOP, "the engine process was stopped for 5 s"),
    "rank 1 stops": (1, signal.SIGSTOP, "rank 1 was stopped for 5 s: the engine ends with it"),
}


def ranks(daemon: Daemon) -> list[list[int]]:
    """Process ids of the engine's ranks, and then of its standby's."""
    return [[engine, *followers(engine)] for engine in engines(daemon)]


def followers(engine: int) -> list[int]:
    try:
        return [pid for pid, command in children(engine).items() if "inferd.engine.process.rank" in command]
    except psutil.NoSuchProcess:
        return []


def with_warm_standby(daemon: Daemon) -> list[list[int]]:
    """The ranks of both, once the standby waits."""
    wait_until(
        lambda: count(daemon, "inferd_standby_ready") == 1 and [len(pids) for pids in ranks(daemon)] == [2, 2],
        within_s=240,
    )
    return ranks(daemon)


def send(daemon: Daemon, pid: int, number: signal.Signals) -> None:
    """Send a signal while the daemon answers."""
    goal = count(daemon, "inferd_generation_tokens_total") + 100
    wait_until(lambda: count(daemon, "inferd_generation_tokens_total") >= goal)
    os.kill(pid, number)


def assert_nothing_is_left(pids: list[int], home: Path) -> None:
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 3.0, "the end of all ranks")
    wait_until(lambda: not list(home.glob("inferd-*")), 3.0, "the end of all sockets")


def said(answers: list[Answer]) -> list[tuple[object, ...]]:
    assert all(answer.status == 200 and not answer.error for answer in answers)
    return [answer.said for answer in answers]


@pytest.mark.sampled(keep=4, among="recoveries")
def test_a_rank_that_dies_is_a_pause(start: Callable[..., Daemon], tmp_path: Path) -> None:
    asks, short = mixed(0), streams(4, 200)
    alone = start(WITHOUT_CACHE)
    expected, expected_short = said(Asker(alone.url).ask(asks)), said(Asker(alone.url).ask(short))
    alone.stop()

    daemon = start(WITHOUT_CACHE, "--standby", *RANKS, env={"TMPDIR": str(tmp_path)})
    assert ", 2 ranks, context" in daemon.output
    assert daemon.get("/state").json()["engine"]["device"].startswith("2 ranks, each cpu, 1 thread")
    asker = Asker(daemon.url)
    (dead, standby) = with_warm_standby(daemon)
    answers = asked_under(lambda: send(daemon, dead[1], signal.SIGKILL), asker, asks)
    assert said(answers) == expected
    wait_until(lambda: restarts(daemon) == 1)
    assert FAULTS["rank 1 dies"][2] in daemon.output
    assert count(daemon, "inferd_requests_replayed_total") > 0, "the kill hit nobody"
    assert ranks(daemon)[0] == standby

    answers = asked_under(lambda: send(daemon, daemon.process.pid, signal.SIGTERM), asker, short)
    assert said(answers) == expected_short
    assert daemon.stop() == 0
    assert_nothing_is_left([*dead, *standby], tmp_path)


@pytest.mark.parametrize(
    ("flags", "code", "line"),
    [
        (
            ("--tensor-parallel-size", "3"), 2,
            "this model cannot be shared by 3 ranks: 3 does not divide its 4 attention heads; give "
            "--tensor-parallel-size as one of 1, 2, 4, with a core or a GPU for each",
        ),
        (
            ("--tensor-parallel-size", "2", "--num-threads", "1"), 2,
            "tensor_parallel_size must be at most 1 here, because each rank needs a thread and a core of its own and "
            "there is 1 thread, but got 2; give a smaller --tensor-parallel-size",
        ),
        ((*RANKS, "--kv-memory", "100TiB"), 4, "kv_memory of 100.0 TiB was asked for, but "),
    ],
    ids=["heads", "threads", "memory"],
)  # fmt: skip
@pytest.mark.sampled(keep=1)
def test_ranks_that_cannot_be_are_refused_in_one_line(
    start: Callable[..., Daemon], flags: tuple[str, ...], code: int, line: str, tmp_path: Path
) -> None:
    """Before anything is loaded. Nothing is left behind."""
    daemon = start("tiny", *flags, "--log-level", "warning", ready=False, env={"TMPDIR": str(tmp_path)})
    assert daemon.process.wait(60) == code
    daemon.stop()
    (said,) = daemon.lines
    assert said.startswith(f"inferd: {line}")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_a_rank_is_a_pause(start: Callable[..., Daemon], fault: str, tmp_path: Path) -> None:
    index, number, line = FAULTS[fault]
    asks = streams(4, 600)
    daemon = start(WITHOUT_CACHE, "--standby", *RANKS, env={"TMPDIR": str(tmp_path)})
    asker = Asker(daemon.url)
    expected = said(asker.ask(asks))
    hit, standby = with_warm_standby(daemon)
    answers = asked_under(lambda: send(daemon, hit[index], number), asker, asks)
    assert said(answers) == expected
    assert restarts(daemon) == 1
    assert line in daemon.output
    assert ranks(daemon)[0] == standby
    left = [pid for pids in with_warm_standby(daemon) for pid in pids]
    daemon.stop(signal.SIGKILL)
    assert_nothing_is_left([*hit, *left], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_whose_rank_fails_is_replaced(start: Callable[..., Daemon], number: signal.Signals) -> None:
    """The engine goes on meanwhile."""
    daemon = start("--standby", *RANKS)
    engine, standby = with_warm_standby(daemon)
    os.kill(standby[1], number)
    wait_until(lambda: not psutil.pid_exists(standby[0]), within_s=20.0)
    assert with_warm_standby(daemon)[0] == engine
    assert restarts(daemon) == 0
    assert not psutil.pid_exists(standby[1])


@pytest.mark.long
def test_a_rank_that_dies_while_it_loads_ends_the_start(start: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start(*RANKS, ready=False, env={"TMPDIR": str(tmp_path)})
    wait_until(lambda: any(map(followers, engines(daemon))))
    engine = daemon.engine_pid
    (rank,) = followers(engine)
    os.kill(rank, signal.SIGKILL)
    assert daemon.process.wait(60) != 0
    assert "rank 1 was killed by SIGKILL while it loaded its part" in daemon.output
    assert_nothing_is_left([engine, rank], tmp_path)
