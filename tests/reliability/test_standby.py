"""R2 with a standby: it replaces the engine without importing a library, and another standby starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.e2e.conftest import Daemon
from tests.reliability.asking import Asker, asked_under, longest_pause_s
from tests.reliability.conftest import WITHOUT_CACHE, count, engines, kill_engine, restarts, wait_until
from tests.reliability.workloads import streams

NUM_STREAMS, NUM_TOKENS, MAX_TRIES = 64, 80, 5


def test_r2_a_standby_takes_the_engines_place(start: Callable[..., Daemon]) -> None:
    daemon = start(WITHOUT_CACHE, "--standby")
    asks, asker = streams(NUM_STREAMS, NUM_TOKENS), Asker(daemon.url)
    expected = asker.ask(asks)
    assert is_as_urgent_as_any(warm_standby(daemon))
    killed_s: list[float] = []

    def kill() -> None:
        goal = count(daemon, "inferd_generation_tokens_total") + 10 * NUM_STREAMS
        wait_until(lambda: count(daemon, "inferd_generation_tokens_total") >= goal)
        killed_s.append(kill_engine(daemon))

    # On a busy machine the kill may come when all is answered.
    while count(daemon, "inferd_requests_replayed_total") < NUM_STREAMS / 2:
        assert len(killed_s) < MAX_TRIES, "no kill came in time"
        standby = warm_standby(daemon)
        answers = asked_under(kill, asker, asks)
        assert [answer.said for answer in answers] == [answer.said for answer in expected]
        wait_until(lambda: restarts(daemon) == len(killed_s))
        assert engines(daemon)[0] == standby
    print(
        f"R2: with a standby the next token on the last of {NUM_STREAMS} streams "
        f"{longest_pause_s(answers, killed_s[-1]):.2f} s after"
    )
    print(next(line for line in reversed(daemon.lines) if "RECOVERED" in line))
    wait_until(lambda: len(engines(daemon)) == 2, what="a standby in its place")


def warm_standby(daemon: Daemon) -> int:
    """The standby's process, once it waits to be promoted."""
    # It gets what processor time others leave it.
    wait_until(lambda: count(daemon, "inferd_standby_ready") == 1 and len(engines(daemon)) == 2, within_s=240)
    return engines(daemon)[1]


def is_as_urgent_as_any(pid: int) -> bool:
    """Whether the process has normal priority. The thread that imported libraries had not."""
    nices = [
        int(Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[16])
        for thread in os.listdir(f"/proc/{pid}/task")
    ]
    # If the kernel groups by session, the session's niceness counts first. The standby's own session has 0 by now.
    session = Path(f"/proc/{pid}/autogroup")
    is_session_so = not session.exists() or session.read_text().split()[-1] == "0"
    return is_session_so and min(nices) == os.getpriority(os.PRIO_PROCESS, os.getpid())
