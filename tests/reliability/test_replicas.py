"""R2 with two replicas: the other one takes over the streams of an engine that is killed."""

from __future__ import annotations

from collections.abc import Callable

from tests.e2e.conftest import Daemon
from tests.reliability.asking import Asker, asked_under, longest_pause_s
from tests.reliability.conftest import HTTP, WITHOUT_CACHE, count, kill_engine, restarts, wait_until
from tests.reliability.workloads import streams

NUM_STREAMS, NUM_TOKENS, MAX_TRIES = 64, 80, 5


def test_r2_streams_go_on_in_the_other_replica(start: Callable[..., Daemon]) -> None:
    daemon = start(WITHOUT_CACHE, "--replicas", "2")
    asks, asker = streams(NUM_STREAMS, NUM_TOKENS), Asker(daemon.url)
    expected = asker.ask(asks)
    killed_s: list[float] = []

    def kill() -> None:
        goal = count(daemon, "inferd_generation_tokens_total") + 10 * NUM_STREAMS
        wait_until(lambda: count(daemon, "inferd_generation_tokens_total") >= goal)
        killed_s.append(kill_engine(daemon))

    # On a busy machine the kill may come when all is answered.
    while count(daemon, "inferd_requests_replayed_total") < NUM_STREAMS / 4:
        assert len(killed_s) < MAX_TRIES, "no kill came in time"
        answers = asked_under(kill, asker, asks)
        assert [answer.said for answer in answers] == [answer.said for answer in expected]
        wait_until(lambda: restarts(daemon) == len(killed_s))
        wait_until(
            lambda: [each["status"] for each in HTTP.get(daemon.url + "/state").json()["replicas"]] == 2 * ["up"]
        )
    print(
        f"R2: with two replicas the next token on the last of {NUM_STREAMS} streams "
        f"{longest_pause_s(answers, killed_s[-1]):.2f} s after"
    )
    print(next(line for line in reversed(daemon.lines) if "RECOVERED" in line))
