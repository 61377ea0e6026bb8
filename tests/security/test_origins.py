"""Browsers: which web pages can use a server without keys, by their origins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from inferd.engine.api.errors import ConfigError
from inferd.server.config.settings import Settings
from inferd.server.text.model import ServedModel
from inferd.server.transport.access import host_name, is_loopback_name
from tests.api.conftest import ScriptedRouter, model, serving
from tests.e2e.conftest import Daemon, daemon

__all__ = ["daemon", "model"]

PAGE, OTHER = "https://app.example", "https://evil.example"
BODY = b'{"prompt": "hi"}'
JSON = {"Content-Type": "application/json"}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
FOREIGN = (
    OTHER, "null", "http://app.example", "https://app.example:8443", "https://app.example.evil.example",
    "http://127.0.0.1.evil.example", "http://localhost.evil.example", "http://localhost@evil.example", "file://",
    "app://localhost", "", "http://evil.example#localhost",
)  # fmt: skip
LOCAL_HOSTS = (
    "localhost",
    "127.0.0.1",
    "127.0.0.2:80",
    "[::1]:8000",
    "LocalHost:8000",
    "localhost.",
    "app.localhost:1",
)
STRANGE_HOSTS = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "0.0.0.0",
    "[2001:db8::1]", "localhost:8000@evil.example", "evil.example?localhost", "notlocalhost", "127.1",
)  # fmt: skip


@pytest.fixture(scope="module")
def router(model: ServedModel) -> ScriptedRouter:
    return ScriptedRouter(model)


def settings_of(**flags: Any) -> Settings:
    return Settings(access_log=False, **flags)


@pytest.fixture(scope="module")
def open_url(model: ServedModel, router: ScriptedRouter) -> Iterator[str]:
    """The default server: no key, on the loopback."""
    with serving(model, router, settings_of()) as url:
        yield url


@pytest.fixture(scope="module")
def listed_url(model: ServedModel, router: ScriptedRouter) -> Iterator[str]:
    flags = {"allowed_origins": (PAGE,), "allowed_hosts": ("LLM.example",)}
    with serving(model, router, settings_of(**flags)) as url:
        yield url


@pytest.fixture(scope="module")
def locked_url(model: ServedModel, router: ScriptedRouter) -> Iterator[str]:
    with serving(model, router, settings_of(api_key=("sk-x",), allowed_origins=(PAGE,))) as url:
        yield url


def is_refused(answer: httpx.Response) -> bool:
    assert "access-control-allow-origin" not in answer.headers
    error = answer.json()["error"]
    return answer.status_code == 403 and error["type"] in ("invalid_request_error", "permission_error")


POSTS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/predict", "/tokenize", "/detokenize", "/infill",
)  # fmt: skip


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/x-www-form-urlencoded", "text/json"])
def test_only_what_says_that_it_is_json_is_read(open_url: str, path: str, content_type: str | None) -> None:
    """Browsers send these requests without a preflight."""
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = httpx.post(open_url + path, content=BODY, headers=headers)
    assert answer.status_code == 415, answer.text
    assert "application/json" in answer.text


@pytest.mark.parametrize("origin", FOREIGN)
def test_no_page_uses_a_server_without_keys(open_url: str, router: ScriptedRouter, origin: str) -> None:
    before = len(router.submits)
    headers = {"Origin": origin}
    for path in ("/v1/completions", "/v1/messages", "/v1/responses/resp_x/cancel", "/live"):
        assert is_refused(httpx.post(open_url + path, content=BODY, headers={**headers, **JSON})), path
    for path in ("/v1/models", "/metrics", "/live"):
        assert is_refused(httpx.get(open_url + path, headers=headers)), path
    assert is_refused(httpx.delete(open_url + "/v1/responses/resp_x", headers=headers))
    preflight = httpx.options(open_url + "/v1/completions", headers={**headers, **PREFLIGHT})
    assert is_refused(preflight)
    assert "--allowed-origins" in preflight.text
    assert len(router.submits) == before


@pytest.mark.parametrize("host", STRANGE_HOSTS)
def test_no_name_that_a_page_may_have_reaches_a_server_without_keys(
    open_url: str, listed_url: str, router: ScriptedRouter, host: str
) -> None:
    """DNS rebinding: the page's own name resolves to the loopback's address, so the page has the same origin."""
    before = len(router.submits)
    for url in (open_url, listed_url):
        for more in ({}, {"Origin": f"http://{host}"}, {"Origin": PAGE}):
            headers = {"Host": host, **more}
            assert is_refused(httpx.get(url + "/v1/models", headers=headers))
            assert is_refused(httpx.post(url + "/v1/completions", content=BODY, headers={**headers, **JSON}))
            assert is_refused(httpx.options(url + "/v1/completions", headers={**headers, **PREFLIGHT}))
    assert "--allowed-hosts" in httpx.get(open_url + "/live", headers={"Host": host}).text
    assert len(router.submits) == before


@pytest.mark.parametrize("host", LOCAL_HOSTS)
def test_this_machine_uses_it_by_all_its_names(open_url: str, host: str) -> None:
    for origin in ({}, {"Origin": f"http://{host}"}, {"Origin": "http://localhost:3000"}):
        headers = {"Host": host, **origin, **JSON}
        assert httpx.post(open_url + "/v1/completions", content=BODY, headers=headers).status_code == 200


def test_names_of_a_proxy_are_listed(listed_url: str) -> None:
    for host in ("llm.example", "LLM.example:443", "localhost"):
        assert httpx.get(listed_url + "/v1/models", headers={"Host": host}).status_code == 200


def test_a_listed_page_reads_every_answer(listed_url: str, locked_url: str) -> None:
    """Errors of keys, bodies and routes can be read too. No other page can read any."""
    for url in (listed_url, locked_url):
        asked = httpx.options(url + "/v1/completions", headers={"Origin": PAGE, **PREFLIGHT})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert asked.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        assert "DELETE" in asked.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in asked.headers
        assert is_refused(httpx.options(url + "/v1/completions", headers={"Origin": OTHER, **PREFLIGHT}))
        for key in ("sk-x", "wrong"):
            headers = {"Origin": PAGE, "Authorization": f"Bearer {key}", **JSON}
            for path, body in (("/v1/completions", BODY), ("/v1/completions", b"{"), ("/nowhere", BODY)):
                answer = httpx.post(url + path, content=body, headers=headers)
                assert answer.headers["access-control-allow-origin"] == PAGE, (path, answer.status_code)
                assert "x-request-id" in answer.headers["access-control-expose-headers"]
                assert "retry-after" in answer.headers["access-control-expose-headers"]
                assert "Origin" in answer.headers["vary"]
    beside = {"Origin": OTHER, "Authorization": "Bearer sk-x", **JSON}
    answer = httpx.post(locked_url + "/v1/completions", content=BODY, headers=beside)
    assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (200, False)


def test_a_stream_to_a_page_comes_as_it_is_made(listed_url: str, router: ScriptedRouter) -> None:
    body = json.dumps({"prompt": "hi", "stream": True})
    with httpx.stream("POST", listed_url + "/v1/completions", content=body, headers={"Origin": PAGE, **JSON}) as answer:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "content-length" not in answer.headers
        assert "".join(answer.iter_text()).endswith("data: [DONE]\n\n")


def test_a_star_is_every_page(model: ServedModel, router: ScriptedRouter) -> None:
    with serving(model, router, settings_of(allowed_origins=("*",), allowed_hosts=("*",))) as url:
        for origin in (OTHER, "null"):
            headers = {"Origin": origin, "Host": "evil.example"}
            assert httpx.options(url + "/v1/completions", headers={**headers, **PREFLIGHT}).status_code == 200
            answer = httpx.get(url + "/v1/models", headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


def test_other_machines_use_a_server_that_is_for_them_by_any_name(model: ServedModel, router: ScriptedRouter) -> None:
    """A container that Prometheus, a load balancer or a probe calls by a network name. Pages are still refused."""
    for flags in ({"allow_unauthenticated": True}, {"api_key": ("sk-x",)}):
        with serving(model, router, settings_of(host="0.0.0.0", **flags)) as url:
            for path in ("/metrics", "/live", "/ready"):
                assert httpx.get(url + path, headers={"Host": "inferd:8000"}).status_code == 200
    with serving(model, router, settings_of(host="0.0.0.0", allow_unauthenticated=True)) as url:
        own = {"Host": "llm.example:80", "Origin": "http://llm.example:80", **JSON}
        assert httpx.post(url + "/v1/completions", content=BODY, headers=own).status_code == 200
        assert is_refused(httpx.post(url + "/v1/completions", content=BODY, headers={**own, "Origin": OTHER}))


def test_a_server_as_a_newcomer_starts_it(daemon: Daemon) -> None:
    assert httpx.get(daemon.url + "/v1/models").status_code == 200
    assert httpx.get(daemon.url + "/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert httpx.get(daemon.url + "/v1/models", headers={"Origin": OTHER}).status_code == 403


@pytest.mark.parametrize(
    ("host", "name", "is_local"),
    [
        ("localhost:8000", "localhost", True),
        ("[::1]:8000", "::1", True),
        ("[::1", "[::1", False),
        ("::1", "::1", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("A.LOCALHOST.", "a.localhost", True),
        ("localhost:8000:x", "localhost:8000:x", False),
        ("localhost:8000@evil", "localhost:8000@evil", False),
        ("localhost.evil", "localhost.evil", False),
        ("", "", False),
        ("\u0661\u0662\u0667.0.0.1", "\u0661\u0662\u0667.0.0.1", False),
    ],
)
def test_names_of_hosts(host: str, name: str, is_local: bool) -> None:
    assert host_name(host) == name
    assert is_loopback_name(name) == is_local


@pytest.mark.parametrize(
    ("flag", "value"),
    [("allowed_origins", origin) for origin in ("app.example", "https://app.example/", "https://", "https://a b", "")]
    + [("allowed_hosts", host) for host in ("http://a", "a:80", "a/b", "", "a b")],
)
def test_what_no_browser_sends_is_no_setting(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: must be"):
        Settings.load({flag: value})


def test_settings_take_lists_and_ports() -> None:
    settings = Settings.load({
        "allowed_origins": "https://App.example,http://localhost:3000,app://obsidian.md,null",
        "allowed_hosts": "LLM.example,fe80::1",
    })  # fmt: skip
    assert settings.allowed_origins == ("https://app.example", "http://localhost:3000", "app://obsidian.md", "null")
    assert settings.allowed_hosts == ("llm.example", "fe80::1")
