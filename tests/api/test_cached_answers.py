"""/metrics and /state need no key and take long to make. So they are made once a second for all callers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from inferd.engine.api.wire.messages import EngineStats
from inferd.server.config.settings import Settings
from inferd.server.dispatch.replica import Replicas
from inferd.server.text.model import ServedModel
from tests.api.conftest import app_settings
from tests.conftest import FRESH

from .conftest import WAIT_S, ScriptedRouter, serving

NUM_CONNECTIONS = 16
NUM_REQUESTS = 30
"""Number of requests of each connection."""
OPENMETRICS = {"Accept": "application/openmetrics-text"}
ADMIN, USER = ({"Authorization": f"Bearer {key}"} for key in ("boss", "alice"))
KEYED = app_settings(api_key=("alice",), admin_key=("boss",), access_log=False)
READ_BY = {"/metrics": "held", "/state": "replicas"}
"""Path -> what each making of its answer reads of the router once."""


class CountedRouter(ScriptedRouter):
    """Counts how often an answer was made from it."""

    num_made: dict[str, int]

    @property
    def held(self) -> EngineStats:
        self.num_made["held"] += 1
        return EngineStats()

    @held.setter
    def held(self, _: EngineStats) -> None:
        self.num_made = {"held": 0, "replicas": 0}

    @property
    def replicas(self) -> Replicas:
        self.num_made["replicas"] += 1
        return super().replicas


@pytest.fixture
def counted(model: ServedModel) -> CountedRouter:
    return CountedRouter(model)


def in_a_loop(url: str, path: str, headers: Sequence[dict[str, str]]) -> set[tuple[str, bytes]]:
    """All (content type, body) that many connections get, each of which asks again at once."""

    def ask(_: int) -> set[tuple[str, bytes]]:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            answers = [client.get(path, headers=headers[i % len(headers)]) for i in range(NUM_REQUESTS)]
        assert {answer.status_code for answer in answers} == {200}
        return {(answer.headers["content-type"], answer.content) for answer in answers}

    with ThreadPoolExecutor(NUM_CONNECTIONS) as threads:
        return set().union(*threads.map(ask, range(NUM_CONNECTIONS)))


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize(
    ("path", "settings", "headers"),
    [
        ("/metrics", KEYED, [{}]),
        ("/metrics", KEYED, [{}, OPENMETRICS, FRESH, FRESH | USER, {"Accept-Encoding": "gzip"}]),
        ("/metrics?name[]=x", KEYED, [{}]),
        ("/state", KEYED, [{}]),
        ("/state", KEYED, [FRESH, FRESH | USER, {"Accept": "text/html"}]),
        ("/state", app_settings(access_log=False), [{}]),
    ],
)
def test_callers_in_a_loop_get_an_answer_that_is_made_once_a_second(
    counted: CountedRouter, path: str, settings: Settings, headers: list[dict[str, str]]
) -> None:
    """Whatever form of it they ask for. One who is not an administrator cannot have it made sooner."""
    with serving(counted.model, counted, settings) as url:
        began_s = time.monotonic()
        bodies = in_a_loop(url, path, headers)
        most = time.monotonic() - began_s + 1
    num_made = counted.num_made[READ_BY[path.partition("?")[0]]]
    assert 1 <= num_made <= most
    assert len(bodies) <= num_made * len({content_type for content_type, _ in bodies})


@pytest.mark.parametrize(
    ("settings", "headers"), [(app_settings(access_log=False), FRESH), (KEYED, FRESH | ADMIN)], ids=["open", "keyed"]
)
def test_who_may_ask_for_any_work_may_ask_for_a_fresh_answer(
    counted: CountedRouter, settings: Settings, headers: dict[str, str]
) -> None:
    with serving(counted.model, counted, settings) as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        for is_leaving in (False, True, False):
            counted.is_leaving = is_leaving
            status = "leaving" if is_leaving else "ready"
            assert client.get("/state", headers=headers).json()["status"] == status
            assert client.get("/state").json()["status"] == status, "the others get it too"
        for _ in range(3):
            client.get("/metrics", headers=headers)
        assert counted.num_made == {"held": 3, "replicas": 3}


def test_head_makes_no_answer_of_its_own(counted: CountedRouter) -> None:
    with serving(counted.model, counted, KEYED) as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        length = client.get("/state").headers["content-length"]
        began_s = time.monotonic()
        for _ in range(NUM_REQUESTS):
            assert len(client.head("/state").content) == 0
        most = time.monotonic() - began_s + 2
        assert int(length) > 0 and counted.num_made["replicas"] <= most
