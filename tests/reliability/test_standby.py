"""R2 with a standby: it replaces the engine without importing a library, and another standby starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import Daemon
from tests.reliability.conftest import WITHOUT_CACHE, count, engines, show_pauses, wait_until


@pytest.mark.sampled(keep=4, among="recoveries")
def test_r2_a_standby_takes_the_engines_place(start: Callable[..., Daemon]) -> None:
    daemon = start(WITHOUT_CACHE, "--standby")

    @contextmanager
    def promoted() -> Iterator[None]:
        standby = warm_standby(daemon)
        yield
        assert engines(daemon)[0] == standby

    assert is_as_urgent_as_any(warm_standby(daemon))
    show_pauses(daemon, "a standby", around=promoted)
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
