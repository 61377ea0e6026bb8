"""R1 and R2: engines are killed during answers of every kind, and every answer equals that of an undisturbed run."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Daemon
from tests.reliability.asking import Asker
from tests.reliability.conftest import WITHOUT_CACHE, count, kill_engine, restarts, show_pauses, wait_until
from tests.reliability.workloads import mixed

SHORT_KILLS, LONG_KILLS = 6, 200


class Killer(threading.Thread):
    """Kills engine after engine, each a random number of steps after it took over."""

    def __init__(self, daemon: Daemon, num_kills: int) -> None:
        super().__init__(daemon=True)
        self._daemon, self._num_kills = daemon, num_kills
        self._rng = random.Random(num_kills)
        self.is_over = False

    def run(self) -> None:
        for number in range(self._num_kills):
            goal = self._steps() + self._rng.randrange(5, 100)
            wait_until(lambda goal=goal: self._steps() >= goal)  # type: ignore[misc]
            kill_engine(self._daemon)
            wait_until(lambda number=number: restarts(self._daemon) > number)  # type: ignore[misc]
            print(f"R1: {number + 1} kills")
        self.is_over = True

    def _steps(self) -> float:
        return count(self._daemon, "inferd_engine_steps_total")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    served = Daemon(WITHOUT_CACHE)
    served.wait_ready()
    yield served
    served.stop(signal.SIGKILL)


@pytest.mark.timeout(3600)
def test_r1_every_answer_under_kills_is_that_of_an_undisturbed_run(daemon: Daemon, is_long: bool) -> None:
    num_kills = LONG_KILLS if is_long else SHORT_KILLS
    asks = [ask for seed in range(8 if is_long else 1) for ask in mixed(seed)]
    asker = Asker(daemon.url)
    expected = asker.ask(asks)
    assert all(answer.status == 200 and not answer.error for answer in expected)
    killer = Killer(daemon, num_kills)
    killer.start()
    num_rounds = 0
    while not killer.is_over:
        assert killer.is_alive(), "the killer found no more steps"
        for ask, answer, due in zip(asks, asker.ask(asks), expected, strict=True):
            assert answer.said == due.said, f"{ask} was answered {answer.said}\n\nundisturbed: {due.said}"
        num_rounds += 1
    replayed = count(daemon, "inferd_requests_replayed_total")
    print(f"R1: {num_kills} kills, {num_rounds} rounds of {len(asks)} requests, {replayed:.0f} choices replayed")
    assert restarts(daemon) == count(daemon, "inferd_engine_restarts_total") == num_kills, daemon.output
    assert replayed >= num_kills, "kills hit nobody"


def test_r2_every_stream_goes_on_soon(daemon: Daemon) -> None:
    show_pauses(daemon, "one engine")
