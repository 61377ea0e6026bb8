"""Keys, tenants, request ids and the access line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from inferd.engine.api.wire.messages import Failure
from inferd.server.config.settings import Settings
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.endpoints.app import Backend, add_routes, check_labels, create_app
from inferd.server.endpoints.route import Access
from inferd.server.endpoints.routes import CHAT, PAGE, ROUTES
from inferd.server.observability.metrics import Metrics
from tests.api.conftest import app_settings

TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
KEYS = ("first-key", "second-key")
PUBLIC = {
    "/health",
    "/live",
    "/ready",
    "/version",
    "/metrics",
    "/state",
    "/v1/loads",
    "/server_info",
    "/model_info",
    "/is_sleeping",
    "/openapi.json",
    "/docs",
}
PUBLIC |= {f"/docs/{name}" for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")}


@pytest.fixture
def locked(serve: Callable[[Settings], str]) -> str:
    """The URL of a server with keys."""
    return serve(app_settings(api_key=KEYS, access_log=False))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_route_is_labelled_and_the_label_holds(locked: str) -> None:
    assert {route.path for route in ROUTES if route.access is Access.PUBLIC} == PUBLIC
    expected = {Access.PUBLIC: set(), Access.KEY: {401}, Access.ADMIN: {401}}
    assert all(route.access is Access.PUBLIC for route in PAGE)
    for route in ROUTES + PAGE:
        path = route.path.replace("{model_id:path}", "tiny")
        status = httpx.request(route.method, locked + path).status_code
        assert ({status} & {401, 403}) == expected[route.access], path


def test_a_route_without_a_label_is_not_built(model: Any, router: Any) -> None:
    app = create_app(Backend(model, router, Metrics("tiny"), app_settings()))
    served = {
        (method, route.path) for route in app.routes if isinstance(route, Route) for method in route.methods or ()
    }
    table = ROUTES + PAGE
    assert served - {("HEAD", route.path) for route in table} == {(route.method, route.path) for route in table}
    app.router.add_route("/forgotten", app.routes[0].endpoint)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"these routes have no access label: .*/forgotten"):
        check_labels(app, table)
    handlers = dict.fromkeys((route for route in table if not route.missing), app.routes[0])
    handlers.pop(CHAT)
    with pytest.raises(RuntimeError, match="POST /v1/chat/completions"):
        add_routes(app, table, handlers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        {"Authorization": "Bearer"},
        bearer("first-key2"),
        bearer("\xff"),
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
    ],
)
def test_no_or_a_wrong_key_is_a_401(locked: str, router: Any, headers: dict[str, str]) -> None:
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    response = httpx.post(f"{locked}/v1/completions", json=TEXT, headers=encoded)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert "first-key2" not in response.text
    assert router.submits == []
    assert httpx.post(f"{locked}/v1/nothing", json=TEXT).status_code == 401, "which routes exist is not told either"


def test_prefixes_are_shared_only_within_a_key_and_a_salt(locked: str, router: Any) -> None:
    for key in KEYS:
        for salt in (None, "s"):
            body = {**TEXT, "cache_salt": salt}
            assert httpx.post(f"{locked}/v1/completions", json=body, headers=bearer(key)).status_code == 200
    salts = [submit.scheduling.cache_salt for submit in router.submits]
    assert len(set(salts)) == 4
    assert all(key not in salt for key in KEYS for salt in salts)


def test_without_keys_everyone_shares(http: httpx.Client, router: Any) -> None:
    for headers in ({}, bearer("anything")):
        assert http.post("/v1/completions", json=TEXT, headers=headers).status_code == 200
    assert [submit.scheduling.cache_salt for submit in router.submits] == ["", ""]


def test_a_sane_request_id_is_repeated_and_another_replaced(http: httpx.Client) -> None:
    assert http.get("/live", headers={"X-Request-Id": "abc-1.2:3_4"}).headers["x-request-id"] == "abc-1.2:3_4"
    for bad in ("a b", "x" * 129, "caf\u00e9", ""):
        given = http.get("/live", headers=[(b"X-Request-Id", bad.encode())]).headers["x-request-id"]
        assert given.startswith("req_")
    assert http.get("/live").headers["x-request-id"] != http.get("/live").headers["x-request-id"]


def test_one_request_id_may_be_used_twice_at_a_time(http: httpx.Client, router: Any) -> None:
    """A client may retry with the same id without a collision."""
    for _ in range(2):
        answer = http.post("/v1/completions", json={**TEXT, "request_id": "mine"})
        assert answer.json()["id"] == "cmpl-mine"
    first, second = router.submits
    assert first.request_id != second.request_id


def test_the_access_line_has_the_facts_and_neither_prompt_nor_key(
    serve: Callable[[Settings], str], caplog: pytest.LogCaptureFixture
) -> None:
    url = serve(app_settings(api_key=KEYS))
    with caplog.at_level(logging.INFO, "inferd.access"):
        for path in ("/live", "/v1/completions", "/a%0d%0ab"):
            httpx.post(url + path, json={"prompt": "a secret"}, headers={**bearer(KEYS[0]), "X-Request-Id": "r1"})
        lines = lines_of(caplog, 2)
    facts = [(r.__dict__["method"], r.__dict__["path"], r.__dict__["status"], r.__dict__["request_id"]) for r in lines]
    assert facts == [("POST", "/v1/completions", 200, "r1"), ("POST", r"/a\r\nb", 404, "r1")]
    assert lines[0].__dict__["response_bytes"] > 0
    text = "\n".join(record.getMessage() for record in lines)
    assert "secret" not in text
    assert KEYS[0] not in text
    assert text.count("\n") == 1


def test_the_access_line_of_a_failure_says_why(
    serve: Callable[[Settings], str], router: Any, script: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url = serve(app_settings())
    router.will(script(token_ids=(), failure=Failure("numerical_error", "Not finite.")))
    asked = [
        ("/v1/completions", {**TEXT, "n": 1_000}, "code=integer_above_max_value param=n model=tiny"),
        ("/v1/completions", {"prompt": "hi", "model": "a\nb"}, r"code=model_not_found param=model"),
        ("/v1/completions", {"prompt": "hi", "x\ny": 1}, r"code=unknown_parameter"),
        ("/v1/responses", {"input": "hi", "stream": True}, "code=numerical_error"),
        ("/nowhere", {}, "code=invalid_url"),
    ]
    with caplog.at_level(logging.INFO, "inferd.access"):
        for path, body, _ in asked:
            httpx.post(url + path, json=body, headers={"X-Request-Id": "r1"})
        lines = lines_of(caplog, len(asked))
    assert {record.getMessage().partition(" r1 ")[2] for record in lines} == {said for _, _, said in asked}
    assert {"integer_above_max_value", "invalid_url"} <= {record.__dict__["code"] for record in lines}


def test_probes_are_quiet_while_the_server_starts(
    serve: Callable[[Settings], str], router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url = serve(app_settings())
    router.state = State.STOPPED
    with caplog.at_level(logging.DEBUG, "inferd.access"):
        for path in ("/health", "/ready", "/live", "/metrics", "/v1/models"):
            httpx.get(url + path)
        httpx.post(f"{url}/v1/completions", json=TEXT)
        lines = lines_of(caplog, 6)
    seen = [(record.__dict__["path"], record.__dict__["status"], record.levelno) for record in lines]
    assert sorted(seen) == [
        ("/health", 503, logging.DEBUG), ("/live", 200, logging.DEBUG), ("/metrics", 200, logging.DEBUG),
        ("/ready", 503, logging.DEBUG), ("/v1/completions", 503, logging.INFO), ("/v1/models", 200, logging.INFO),
    ]  # fmt: skip


def lines_of(caplog: pytest.LogCaptureFixture, count: int) -> list[logging.LogRecord]:
    """The lines of the access log. A line is written once the answer has been sent: the client may be faster."""
    deadline = time.monotonic() + 20
    while len(lines := [record for record in caplog.records if record.name == "inferd.access"]) < count:
        assert time.monotonic() < deadline, lines
    return lines


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_notice_is_a_header_a_word_in_the_log_and_a_count(
    serve: Callable[[Settings], str], caplog: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    url = serve(app_settings())
    body = {"messages": [{"role": "user", "content": "hi"}], "verbosity": "low", "max_tokens": 2, "stream": is_stream}
    with caplog.at_level(logging.INFO, "inferd.access"):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body)
        silent = httpx.post(f"{url}/v1/chat/completions", json={**body, "verbosity": "medium"})
        lines = lines_of(caplog, 2)
    assert answer.headers["x-inferd-warning"].startswith("'verbosity' has no effect")
    assert "x-inferd-warning" not in silent.headers
    assert [record.getMessage().endswith(" no_effect") for record in lines] == [True, False]
    assert lines[0].__dict__["notices"] == "no_effect"
    assert 'inferd_request_notices_total{notice="no_effect"} 1.0' in httpx.get(f"{url}/metrics").text


def test_browsers_may_call_where_the_operator_says_so(serve: Callable[[Settings], str], http: httpx.Client) -> None:
    url = serve(app_settings(api_key=KEYS, allowed_origins=("https://a.example",), access_log=False))
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    allowed = httpx.options(f"{url}/v1/completions", headers=asked)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://a.example")
    refused = httpx.options(f"{url}/v1/completions", headers={**asked, "Origin": "https://b.example"})
    assert "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in http.get("/live", headers=asked).headers


def test_behind_a_prefix_public_paths_stay_public(serve: Callable[..., str]) -> None:
    """A proxy removes the prefix, and the server adds it to every path."""
    url = serve(app_settings(api_key=KEYS), root_path="/llm")
    assert httpx.get(url + "/live").status_code == 200
    assert httpx.get(url + "/v1/models").status_code == 401
    assert httpx.get(url + "/v1/models", headers=bearer(KEYS[0])).status_code == 200
