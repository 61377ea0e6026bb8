"""Admin routes: access, answers and effects, and routes that are not served."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from inferd.server.config.settings import Settings
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.endpoints.route import Access
from inferd.server.endpoints.routes import ROUTES
from tests.api.conftest import app_settings
from tests.configs import engine_config

ADMIN, USER = "the-admin-key", "a-users-key"
PATHS = [(route.method, route.path) for route in ROUTES if route.access is Access.ADMIN]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(serve: Callable[[Settings], str]) -> str:
    return serve(app_settings(api_key=(USER,), admin_key=(ADMIN,), access_log=False))


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_only_an_admin_key_opens_them(guarded: str, router: Any, method: str, path: str) -> None:
    for headers, status, code in (
        ({}, 401, "invalid_api_key"),
        (bearer("wrong"), 401, "invalid_api_key"),
        (bearer(USER), 403, "insufficient_permissions"),
    ):
        response = httpx.request(method, guarded + path, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert httpx.request(method, guarded + path, headers=bearer(ADMIN)).status_code not in (401, 403)
    assert router.num_resets == (path == "/reset_prefix_cache")


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_without_an_admin_key_they_are_nobodys(http: httpx.Client, router: Any, method: str, path: str) -> None:
    """This holds on the loopback too, because requests through a proxy come from there."""
    for headers in ({}, bearer("anything"), {"X-Forwarded-For": "127.0.0.1"}):
        response = http.request(method, path, headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (403, "insufficient_permissions")
        assert "--admin-key" in error["message"]
    assert router.num_resets == 0


@pytest.mark.parametrize(
    "path", ["//reset_prefix_cache", "/reset_prefix_cache/", "/%72eset_prefix_cache", "/./reset_prefix_cache"]
)
def test_no_spelling_of_a_path_goes_around_the_key(guarded: str, router: Any, path: str) -> None:
    response = httpx.post(guarded + path, headers=bearer(USER))
    assert response.status_code in (403, 404)
    assert router.num_resets == 0


def test_an_admin_key_opens_the_other_routes_too(guarded: str, serve: Callable[[Settings], str]) -> None:
    assert httpx.get(guarded + "/v1/models", headers=bearer(ADMIN)).status_code == 200
    open_url = serve(app_settings(admin_key=(ADMIN,), access_log=False))
    assert httpx.get(open_url + "/v1/models").status_code == 200, "an admin key alone closes nothing else"
    for headers, words in (({}, "You didn't provide an admin key."), (bearer("wrong"), "Incorrect API key provided.")):
        refused = httpx.post(open_url + "/reset_prefix_cache", headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["message"].startswith(words)
    assert httpx.post(open_url + "/reset_prefix_cache").status_code == 401


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("", (False, False)),
        ("?reset_external=true", (False, True)),
        ("?reset_running_requests=True&reset_external=false", (True, False)),
    ],
)
def test_vllms_parameters_say_what_else_is_reset(
    guarded: str, router: Any, query: str, asked: tuple[bool, bool]
) -> None:
    answer = httpx.post(guarded + f"/reset_prefix_cache{query}", headers=bearer(ADMIN))
    assert (answer.status_code, answer.json(), router.last_reset) == (200, {}, asked)


def test_a_directory_that_no_engine_can_clear_is_told(guarded: str, router: Any) -> None:
    wrong = httpx.post(guarded + "/reset_prefix_cache?reset_external=maybe", headers=bearer(ADMIN))
    assert (wrong.status_code, wrong.json()["error"]["param"], router.num_resets) == (400, "reset_external", 0)
    other = httpx.post(guarded + "/reset_prefix_cache?reset_weights=true", headers=bearer(ADMIN))
    assert (other.status_code, other.json()["error"]["param"], router.num_resets) == (400, "reset_weights", 0)
    router.state = State.UNLOADED
    assert httpx.post(guarded + "/reset_prefix_cache", headers=bearer(ADMIN)).status_code == 200
    refused = httpx.post(guarded + "/reset_prefix_cache?reset_external=true", headers=bearer(ADMIN))
    assert refused.status_code == 503 and "its KV directory was not cleared" in refused.json()["error"]["message"]


def test_the_prefix_cache_is_reset_where_there_is_an_engine(guarded: str, router: Any) -> None:
    assert httpx.post(guarded + "/reset_prefix_cache", headers=bearer(ADMIN)).json() == {}
    router.state = State.STOPPED
    assert httpx.post(guarded + "/reset_prefix_cache", headers=bearer(ADMIN)).status_code == 503
    assert router.num_resets == 1


@pytest.mark.parametrize("key", [ADMIN, USER])
@pytest.mark.parametrize(("method", "path"), [(route.method, route.path) for route in ROUTES if route.missing])
def test_what_is_not_served_says_what_to_do_and_not_to_ask_again(
    guarded: str, method: str, path: str, key: str
) -> None:
    """An admin key would not help, so the server asks for none."""
    response = httpx.request(method, guarded + path, headers=bearer(key), json={"lora_name": "x"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (501, "not_implemented", None)
    assert error["message"] == next(route.missing for route in ROUTES if route.path == path)
    assert response.headers["x-should-retry"] == "false"


def test_the_configuration_is_told_with_its_sources_and_without_secrets(
    serve: Callable[[Settings], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERD_MAX_BODY_BYTES", "1MiB")
    settings = Settings.load({"api_key": (USER,), "admin_key": (ADMIN,), "port": 1234})
    config = engine_config(model_path="/models/x", max_model_len=2048, kv_memory_bytes=2**20)
    url = serve(settings, config=config)
    response = httpx.get(url + "/config", headers=bearer(ADMIN))
    told = response.json()
    assert told["port"] == {"value": "1234", "source": "flag --port", "became": None}
    assert told["max_body_bytes"]["source"] == "env INFERD_MAX_BODY_BYTES"
    assert told["max_model_len"] == {"value": "auto", "source": "default", "became": 2048}
    assert told["kv_memory"]["became"] == 2**20
    assert told["api_key"]["value"] == told["admin_key"]["value"] == "1 set"
    assert USER not in response.text
    assert ADMIN not in response.text
    assert set(told) == set(Settings.model_fields)
    assert json.loads(response.content)
