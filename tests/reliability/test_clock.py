"""R20: a wall clock that jumps by an hour at each read, both ways, ends nothing early and changes no figure."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Daemon
from tests.reliability.asking import Ask, Asker
from tests.reliability.conftest import kill_engine, restarts, wait_until
from tests.reliability.workloads import mixed

JUMP_S = 3600.0
JUMPING = f'''
"""Read by every Python process before its own first line."""
import itertools, os, time
jumps_s, now_s = itertools.cycle((-{JUMP_S}, 0.0, {JUMP_S})), time.time
time.time = lambda: now_s() + next(jumps_s)
time.time_ns = lambda: int(time.time() * 1e9)
open(os.path.join({{home!r}}, str(os.getpid())), "w").close()
'''
BOUND_S = 900.0
"""Seconds that no answer needs on any machine, but fewer than a jump."""


@pytest.mark.sampled(keep=4, among="recoveries")
def test_r20_a_jumping_wall_clock_is_not_noticed(start: Callable[..., Daemon], tmp_path: Path) -> None:
    code, seen = tmp_path / "code", tmp_path / "seen"
    code.mkdir()
    seen.mkdir()
    (code / "sitecustomize.py").write_text(JUMPING.format(home=str(seen)))
    daemon = start(
        "--no-prefix-caching", "--ttft-target", "10m", "--tpot-target", "10m", env={"PYTHONPATH": with_path(code)}
    )
    assert {str(daemon.process.pid), str(daemon.engine_pid)} <= {file.name for file in seen.iterdir()}

    asks = [Ask(ask.path, {**ask.body, "timeout": BOUND_S}) for ask in mixed(1)]
    expected = Asker(daemon.url).ask(asks)
    assert all(answer.status == 200 and not answer.error for answer in expected), expected
    dead = kill_engine(daemon)
    answers = Asker(daemon.url).ask(asks)
    assert dead and [answer.said for answer in answers] == [answer.said for answer in expected]
    wait_until(lambda: restarts(daemon) == 1)

    created = stored_and_read_again(daemon)
    assert max(created) - min(created) >= JUMP_S / 2, "the clock did not jump"
    for name, value in samples(daemon):
        assert value >= 0, f"{name} is {value}"
        if "_seconds" in name and not name.endswith(("_bucket", "_count", "start_time_seconds")):
            assert value < len(asks) * BOUND_S, f"{name} is {value}"


def with_path(folder: Path) -> str:
    """The Python path with `folder` before the tests' own modules."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))


def stored_and_read_again(daemon: Daemon) -> list[float]:
    """Creation times of some stored answers, which must still be stored."""
    made: list[float] = []
    with httpx.Client(base_url=daemon.url, verify=False, timeout=60) as http:
        for _ in range(4):
            answer = http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 16}).json()
            assert http.get(f"/v1/responses/{answer['id']}").status_code == 200
            made.append(answer["created_at"])
    return made


def samples(daemon: Daemon) -> list[tuple[str, float]]:
    families = text_string_to_metric_families(daemon.get("/metrics").text)
    return [(sample.name, sample.value) for family in families for sample in family.samples]
