"""Latency targets over HTTP: headers and the server's own, the 429 of a request that would be late, and /state."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import EngineStats, Failure, StepCosts, StepModel
from inferd.server.endpoints import respond
from tests.api.conftest import app_settings

WAIT_S = 60.0
"""Seconds by which a request may be late on a busy machine."""
LATE = Failure("rate_limit_exceeded", "the first token would come in about 3 s", None, 2.5)

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 9, "model": "tiny"},
}


def targets_of(router: Any) -> list[tuple[float | None, float | None]]:
    """The targets of each choice that was submitted."""
    asked = [submit.scheduling for submit in router.submits]
    return [(scheduling.ttft_target_s, scheduling.tpot_target_s) for scheduling in asked]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, (0.2, 0.03)),
        ({"x-slo-ttft-ms": "1500"}, (1.5, 0.03)),
        ({"X-SLO-TPOT-Ms": "12.5"}, (0.2, 0.0125)),
        ({"x-slo-ttft-ms": "50", "x-slo-tpot-ms": "5"}, (0.05, 0.005)),
    ],
)
def test_a_header_wins_over_the_servers_target(
    serve: Callable[..., str], router: Any, path: str, headers: dict[str, str], expected: tuple[float, float]
) -> None:
    base = serve(app_settings(ttft_target=0.2, tpot_target=0.03))
    assert httpx.post(base + path, json=ROUTES[path], headers=headers).status_code == 200
    assert targets_of(router) == [expected]


@pytest.mark.parametrize("path", [*ROUTES, "/v1/embeddings"])
@pytest.mark.parametrize(("headers", "target_s"), [({}, 2.0), ({"x-slo-ttft-ms": "500"}, 0.5)])
def test_admission_is_told_what_is_left_of_the_target(
    serve: Callable[..., str],
    router: Any,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    headers: dict[str, str],
    target_s: float,
) -> None:
    """The request arrived 100 s before its admission. Embeddings generate no token and so have no target."""
    admitted: list[tuple[object, ...]] = []
    monkeypatch.setattr(respond, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 100.0))
    monkeypatch.setattr(router, "check_queue", lambda *given: admitted.append(given))
    base = serve(app_settings(ttft_target=2.0))
    assert httpx.post(base + path, json=ROUTES.get(path, {"input": "hi"}), headers=headers).status_code == 200
    ((_, num_tokens, left_s, num_choices),) = admitted
    assert (num_tokens, num_choices) == (1, 1)
    if path == "/v1/embeddings":
        assert left_s is None
    else:
        assert isinstance(left_s, float) and target_s - 100.0 - WAIT_S < left_s <= target_s - 100.0


def test_admission_is_told_how_many_choices_come(
    http: httpx.Client, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted: list[int] = []
    monkeypatch.setattr(router, "check_queue", lambda *given: admitted.append(given[3]))
    http.post("/v1/completions", json={"prompt": ["a", "b", "c"], "n": 2})
    http.post("/v1/chat/completions", json={**CHAT, "n": 4})
    assert admitted == [6, 4]


def test_rendering_asks_for_no_place_in_the_queue(
    http: httpx.Client, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RequestError("server_is_overloaded", "Later.")

    monkeypatch.setattr(router, "check_queue", refuse)
    assert http.post("/v1/completions/render", json={"prompt": "hi"}).status_code == 200
    assert http.post("/v1/chat/completions/render", json=CHAT).status_code == 200
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 503


def test_without_targets_none_is_submitted(http: httpx.Client, router: Any) -> None:
    http.post("/v1/completions", json={"prompt": "hi"})
    assert targets_of(router) == [(None, None)]


@pytest.mark.parametrize("name", ["X-SLO-TTFT-Ms", "X-SLO-TPOT-Ms"])
@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("fast", "invalid_value"),
        ("nan", "invalid_value"),
        ("0", "decimal_below_min_value"),
        ("-5", "decimal_below_min_value"),
        ("inf", "decimal_above_max_value"),
        ("1e9", "decimal_above_max_value"),
    ],
)
def test_a_header_that_is_no_target(http: httpx.Client, router: Any, name: str, value: str, code: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "hi"}, headers={name: value})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, name)
    assert router.submits == []


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("is_stream", [False, True])
def test_one_that_would_be_late_gets_a_429_and_when_to_come_back(
    http: httpx.Client, router: Any, script: Any, path: str, is_stream: bool
) -> None:
    """This holds for a stream too, because it had not begun: that of a request with a target begins with the first
    token. The wait is 2.5 s and up to as much again as jitter."""
    router.will(script(token_ids=(), failure=LATE))
    response = http.post(path, json={**ROUTES[path], "stream": is_stream}, headers={"x-slo-ttft-ms": "50"})
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert "about 3 s" in response.json()["error"]["message"]
    wait_ms = int(response.headers["retry-after-ms"])
    assert 2_500 <= wait_ms <= 5_000
    assert (int(response.headers["retry-after"]) - 1) * 1_000 < wait_ms <= int(response.headers["retry-after"]) * 1_000


def test_openais_client_sees_a_rate_limit(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(token_ids=(), failure=LATE))
    client = openai.OpenAI(base_url=str(http.base_url.join("/v1")), api_key="k", max_retries=0)
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert refused.value.code == "rate_limit_exceeded"


def test_state_shows_targets_and_the_step_time_model(serve: Callable[..., str], router: Any) -> None:
    router.stats = EngineStats(
        num_shed=3, num_tokens_waiting=1200,
        step_model=StepModel(
            decode=StepCosts(0.0042, 1e-7, 3.4e-8), chunked=StepCosts(0.005, 2.2e-5, 0.0, 3.8e-10),
            error_p50=0.0213, error_p95=0.0611, prefill_tokens_per_s=41_234.4,
        ),
    )  # fmt: skip
    settings = app_settings(ttft_target=0.2, tpot_target=0.03, e2e_target=10.0)
    state = httpx.get(serve(settings) + "/state").json()
    assert state["targets"] == {"ttft_ms": 200.0, "tpot_ms": 30.0, "e2e_ms": 10000.0}
    model = state["step_model"]
    assert model["steps_without_chunks"] == "4.2 ms a step, 100 ns a token, 34 ns a token of context behind a decode"
    assert model["steps_with_chunks"] == "5 ms a step, 22 us a token, 760 ps a pair of a query and a key"
    assert (model["error_p50"], model["error_p95"], model["prefill_tokens_per_s"]) == (0.0213, 0.0611, 41_234)
    assert (model["waiting_prompt_tokens"], model["refused_for_their_target"]) == (1200, 3)
