"""R2 with two replicas: the other one takes over the streams of an engine that is killed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.conftest import Daemon
from tests.reliability.conftest import HTTP, NUM_STREAMS, WITHOUT_CACHE, show_pauses, wait_until

LONG_KILLS = 20


@pytest.mark.sampled(keep=4, among="recoveries")
def test_r2_streams_go_on_in_the_other_replica(start: Callable[..., Daemon], is_long: bool) -> None:
    daemon = start(WITHOUT_CACHE, "--replicas", "2")

    @contextmanager
    def until_both_are_up() -> Iterator[None]:
        yield
        wait_until(
            lambda: [each["status"] for each in HTTP.get(daemon.url + "/state").json()["replicas"]] == 2 * ["up"]
        )

    show_pauses(
        daemon,
        "two replicas",
        num_kills=LONG_KILLS if is_long else 1,
        least_moved=NUM_STREAMS / 4,
        around=until_both_are_up,
    )
    said = [line for line in daemon.lines if re.search("replica [01]: |RECOVERED", line)]
    recovered = max(i for i, line in enumerate(said) if "RECOVERED" in line)
    assert "killed by SIGKILL" in said[recovered - 1] and "starting another" in said[recovered + 1], daemon.output
