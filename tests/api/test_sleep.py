"""/sleep, /wake_up and /is_sleeping: who sleeps how, and the answers to requests and probes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.endpoints.app import Backend
from inferd.server.observability.metrics import Metrics
from inferd.server.text.model import ServedModel
from tests.api.conftest import FRESH, ScriptedRouter, app_settings, replace, serving

ADMIN = {"Authorization": "Bearer boss"}
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["hi"]},
    "/v1/score": {"text_1": "hi", "text_2": "hi"},
    "/v1/classify": {"input": "hi"},
    "/infill": {"input_prefix": "hi", "input_suffix": "ho"},
}


@pytest.fixture(scope="module")
def second(model: ServedModel) -> ScriptedRouter:
    return ScriptedRouter(replace(model, names=("second", "2nd")))


@pytest.fixture(scope="module")
def first(model: ServedModel) -> ScriptedRouter:
    return ScriptedRouter(model)


@pytest.fixture(scope="module")
def two(model: ServedModel, first: ScriptedRouter, second: ScriptedRouter) -> Iterator[httpx.Client]:
    settings = app_settings(admin_key=("boss",), access_log=False)
    beside = Backend(second.model, second, Metrics("second"), settings)  # type: ignore[arg-type]
    with (
        serving(model, first, settings, others=[beside]) as url,
        httpx.Client(base_url=url, timeout=20, headers={**FRESH, **ADMIN}) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def forget(first: ScriptedRouter, second: ScriptedRouter) -> None:
    for router in (first, second):
        router.reset()


def is_sleeping(client: httpx.Client, **query: str) -> bool:
    answer = client.get("/is_sleeping", params=query)
    assert answer.status_code == 200 and list(answer.json()) == ["is_sleeping"]
    return bool(answer.json()["is_sleeping"])


def test_without_a_name_all_models_sleep_and_wake(
    two: httpx.Client, first: ScriptedRouter, second: ScriptedRouter
) -> None:
    assert not is_sleeping(two)
    answer = two.post("/sleep")
    assert (answer.status_code, answer.json()) == (200, {})
    assert first.sleeps == second.sleeps == [(1, "abort")], "vLLM's defaults"
    assert is_sleeping(two) and is_sleeping(two, model="second")
    answer = two.post("/wake_up")
    assert (answer.status_code, answer.json()) == (200, {})
    assert first.state is second.state is State.SERVING and not is_sleeping(two)


def test_a_name_chooses_one_and_the_other_serves(
    two: httpx.Client, first: ScriptedRouter, second: ScriptedRouter
) -> None:
    assert two.post("/sleep?model=2nd&level=2&mode=wait").status_code == 200
    assert (first.sleeps, second.sleeps) == ([], [(2, "wait")])
    assert not is_sleeping(two) and is_sleeping(two, model="second") and not is_sleeping(two, model="tiny")
    asked = {"prompt": "hi", "max_tokens": 1}
    assert two.post("/v1/completions", json={**asked, "model": "tiny"}).status_code == 200
    assert two.post("/v1/completions", json={**asked, "model": "second"}).status_code == 503
    ready = two.get("/ready")
    assert (ready.status_code, ready.json()["models"]) == (200, {"tiny": "ready", "second": "sleeping"})
    assert two.get("/v1/models/2nd").json()["status"] == "sleeping"
    assert two.get("/state").json()["models"][0]["status"] == "sleeping"
    assert two.post("/wake_up?model=second").status_code == 200 and second.state is State.SERVING


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/is_sleeping"])
def test_a_name_that_is_not_served_is_not_found(two: httpx.Client, path: str) -> None:
    answer = two.request("GET" if path == "/is_sleeping" else "POST", f"{path}?model=third")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("level=3", "integer_above_max_value", "level"),
        ("level=-1", "invalid_type", "level"),
        ("level=deep", "invalid_type", "level"),
        ("mode=drop", "invalid_value", "mode"),
        ("tags=kv_cache", "unsupported_parameter", "tags"),
        ("depth=1", "unknown_parameter", "depth"),
    ],
)
def test_what_a_sleep_does_not_know_is_refused(
    two: httpx.Client, first: ScriptedRouter, query: str, code: str, param: str
) -> None:
    answer = two.post(f"/sleep?{query}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)
    assert first.sleeps == [] and first.state is State.SERVING


def test_weights_and_cache_wake_together(two: httpx.Client, first: ScriptedRouter, second: ScriptedRouter) -> None:
    two.post("/sleep?level=2")
    for partial in ("tags=weights", "tags=kv_cache", "tags=weights&tags=scheduling"):
        answer = two.post(f"/wake_up?{partial}")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_value", "tags")
        assert first.state is second.state is State.SLEEPING
    assert two.post("/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert first.state is second.state is State.SERVING
    two.post("/sleep?level=0")
    assert first.state is State.PAUSED and is_sleeping(two)
    assert two.post("/wake_up?tags=scheduling").status_code == 200, "level 0 has given nothing up"
    assert first.state is State.SERVING
    assert two.post("/wake_up?tags=weights").status_code == 200, "nothing is away"


def test_one_that_refuses_to_sleep_is_told_and_the_other_sleeps(
    two: httpx.Client, first: ScriptedRouter, second: ScriptedRouter
) -> None:
    first.refusal = RequestError("model_is_busy", "This model is being loaded.")
    answer = two.post("/sleep")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_is_busy")
    assert first.state is State.SERVING and second.state is State.SLEEPING


def test_a_model_that_failed_neither_sleeps_nor_counts(
    two: httpx.Client, first: ScriptedRouter, second: ScriptedRouter
) -> None:
    second.fail("Its engines died.")
    assert two.post("/sleep").status_code == 200
    assert second.state is State.FAILED and first.state is State.SLEEPING
    assert is_sleeping(two) and not is_sleeping(two, model="second")


@pytest.mark.parametrize("state", [State.PAUSED, State.SLEEPING])
def test_requests_and_probes_are_told_how_to_wake_it(http: httpx.Client, router: ScriptedRouter, state: State) -> None:
    router.state = state
    for path, fields in GENERATING.items():
        answer = http.post(path, json=fields)
        error = answer.json()["error"]
        assert answer.status_code == (529 if path == "/v1/messages" else 503), path
        assert error["message"] == (
            "The model `tiny` is asleep. POST /wake_up?model=tiny, with an admin key, wakes it."
        )
        if path != "/v1/messages":
            assert (error["code"], answer.headers["x-should-retry"]) == ("model_is_asleep", "false")
    assert router.submits == []
    for path in ("/health", "/ready"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_is_asleep"), "it gets no traffic"
    assert http.get("/live").status_code == 200, "it is not restarted"
    assert http.get("/v1/models").json()["data"][0]["status"] == state.value
    assert http.post("/tokenize", json={"prompt": "hi"}).status_code == 200
    assert http.get("/state").json()["status"] == state.value
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}


def test_the_metrics_say_at_which_level_it_sleeps(
    two: httpx.Client, first: ScriptedRouter, second: ScriptedRouter
) -> None:
    def of(name: str, metric: str) -> dict[str, float]:
        lines = [line for line in two.get("/metrics").text.splitlines() if line.startswith(metric + "{")]
        mine = [line for line in lines if f'model_name="{name}"' in line]
        return {line.split('state="')[1].split('"')[0]: float(line.split()[-1]) for line in mine}

    awake = {"awake": 1.0, "level_0": 0.0, "level_1": 0.0, "level_2": 0.0}
    assert of("tiny", "inferd_sleep_state") == of("second", "inferd_sleep_state") == awake
    two.post("/sleep?model=second&level=2")
    assert of("tiny", "inferd_sleep_state") == awake
    assert of("second", "inferd_sleep_state") == {**awake, "awake": 0.0, "level_2": 1.0}
    two.post("/sleep?model=second&level=0")
    assert of("second", "inferd_sleep_state")["level_0"] == 1.0


def test_they_need_an_admin_key_and_asking_needs_none(serve: Callable[..., str], router: ScriptedRouter) -> None:
    url = serve(app_settings(access_log=False, api_key=("sk-1",), admin_key=("boss",)))
    for path in ("/sleep", "/wake_up"):
        statuses = [
            httpx.post(url + path, headers=headers).status_code
            for headers in ({}, {"Authorization": "Bearer sk-1"}, ADMIN)
        ]
        assert statuses == [401, 403, 200]
    assert router.sleeps == [(1, "abort")] and router.state is State.SERVING
    assert httpx.get(url + "/is_sleeping").json() == {"is_sleeping": False}
