"""Everything under /v1/messages fails in Anthropic's shape, and nothing else does; keys as its clients send them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Failure
from inferd.server.config.settings import Settings
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.errors import anthropic as anthropic_errors
from inferd.server.errors import table
from tests.api.conftest import app_settings

from .test_error_table import EXPECTED, check_headers

ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
PATHS = ("/v1/messages", "/v1/messages/count_tokens")

INVALID = (400, "invalid_request_error")
WIRE = {
    **{code: INVALID for code, (status, _, _) in EXPECTED.items() if status == 400},
    "invalid_api_key": (401, "authentication_error"),
    "insufficient_permissions": (403, "permission_error"),
    "invalid_url": (404, "not_found_error"),
    "model_not_found": (404, "not_found_error"),
    "method_not_supported": (405, "invalid_request_error"),
    "deadline_exceeded": (408, "timeout_error"),
    "request_too_large": (413, "request_too_large"),
    "unsupported_content_type": (415, "invalid_request_error"),
    "websocket_not_supported": (426, "invalid_request_error"),
    "rate_limit_exceeded": (429, "rate_limit_error"),
    "slow_down": (429, "rate_limit_error"),
    "internal_error": (500, "api_error"),
    "engine_error": (500, "api_error"),
    "numerical_error": (500, "api_error"),
    "not_implemented": (501, "api_error"),
    "server_is_overloaded": (529, "overloaded_error"),
}
"""Our code -> (status, type), as Anthropic's clients know them."""

RETRIED = {408, 409, 429, *range(500, 600)}
"""Statuses after which these clients retry, unless the answer has `x-should-retry: false`."""


def body(kind: str, message: str, request_id: str) -> bytes:
    told = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
    return json.dumps(told, separators=(",", ":")).encode()


def check(response: httpx.Response, status: int, kind: str) -> str:
    """Checks the shape of an error, and returns its message."""
    told = response.json()
    assert (response.status_code, told["type"], told["error"]["type"]) == (status, "error", kind), response.text
    assert set(told) == {"type", "error", "request_id"}
    assert set(told["error"]) == {"type", "message"}
    assert told["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert told["error"]["message"]
    return str(told["error"]["message"])


def test_every_row_has_its_type() -> None:
    assert set(anthropic_errors.TYPES) == {row.status for row in table.ROWS.values()}


@pytest.mark.parametrize("code", WIRE)
def test_a_refusal_byte_for_byte(http: httpx.Client, router: Any, code: str) -> None:
    status, kind = WIRE[code]
    for stream in (False, True):
        router.refusal = RequestError(code, "Some words.", "system")
        response = http.post("/v1/messages", json={**ASKED, "stream": stream}, headers={"x-request-id": "req_1"})
        assert (response.status_code, response.content) == (status, body(kind, "system: Some words.", "req_1"))
        assert response.headers["request-id"] == "req_1"
        if status == 529:
            assert 1_000 <= int(response.headers["retry-after-ms"]) <= 2_000
        else:
            check_headers(response)


@pytest.mark.parametrize("code", WIRE)
def test_a_failure_inside_a_stream_byte_for_byte(http: httpx.Client, router: Any, script: Any, code: str) -> None:
    router.will(script(text="some text", failure=Failure(code, "Some words.", None)))
    headers = {"x-request-id": "req_1"}
    response = http.post("/v1/messages", json={**ASKED, "stream": True}, headers=headers)
    status, kind = WIRE[code]
    assert response.status_code == 200
    *before, last, nothing = response.content.split(b"\n\n")
    assert last == b"event: error\ndata: " + body(kind, "Some words.", "req_1")
    assert nothing == b""
    assert before[0].startswith(b"event: message_start\n")
    assert not any(line.startswith(b"event: message_stop") for line in before)
    plain = http.post("/v1/messages", json=ASKED, headers=headers)
    assert (plain.status_code, plain.content) == (status, body(kind, "Some words.", "req_1"))


def test_an_engine_that_dies_tells_nobody_how(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(text="some text", dies=True))
    message = check(http.post("/v1/messages", json=ASKED), 500, "api_error")
    assert "secret" not in message
    router.will(script(text="some text", breaks=True))
    check(http.post("/v1/messages", json=ASKED), 500, "api_error")
    streamed = http.post("/v1/messages", json={**ASKED, "stream": True})
    assert b"event: error\n" in streamed.content
    assert b"secret" not in streamed.content


@pytest.mark.parametrize("path", PATHS)
def test_what_comes_before_any_field(http: httpx.Client, serve: Callable[[Settings], str], path: str) -> None:
    check(http.get(path), 405, "invalid_request_error")
    assert http.get(path).headers["allow"] == "POST"
    check(http.post(path, content=b"{", headers={"content-type": "application/json"}), 400, "invalid_request_error")
    check(http.post(path, content=b"x", headers={"content-type": "text/plain"}), 415, "invalid_request_error")
    check(http.post(path, json=[]), 400, "invalid_request_error")
    fields = {"model": "nobody", "messages": ASKED["messages"]} | ({"max_tokens": 9} if path == PATHS[0] else {})
    assert "nobody" in check(http.post(path, json=fields), 404, "not_found_error")
    small = serve(app_settings(max_body_bytes=100, access_log=False))
    check(httpx.post(small + path, json={"messages": "x" * 200}), 413, "request_too_large")
    chunks = httpx.post(small + path, content=iter([b"x" * 200]), headers={"content-type": "application/json"})
    check(chunks, 413, "request_too_large")


def test_other_paths_keep_their_own_shape(http: httpx.Client) -> None:
    for path in ("/v1/messages/batches", "/v1/messages/", "/v1/messages/count_tokens/x"):
        check(http.post(path, json=ASKED), 404, "not_found_error")
    for path in ("/v1/messagesx", "/v1/message", "/messages", "/v1/chat/completions/v1/messages"):
        assert set(http.post(path, json=ASKED).json()["error"]) == {"message", "type", "param", "code"}
    assert "request-id" not in http.get("/v1/models").headers


def test_turns_that_say_nothing_are_no_conversation(http: httpx.Client) -> None:
    silent = {"role": "system", "content": "", "output_config": {"effort": "low"}}
    for path, asked in zip(PATHS, (ASKED, {"model": "tiny"}), strict=True):
        message = check(http.post(path, json={**asked, "messages": [silent]}), *INVALID)
        assert "Expected a turn with content." in message


def test_the_field_is_named_once(http: httpx.Client) -> None:
    for fields, words in (
        ({"max_tokens": "x"}, "Invalid type for 'max_tokens': expected an integer, but got a string instead."),
        ({"messages": [{"role": "x"}]}, "Missing required parameter: 'messages[0].content'."),
        ({"messages": [{"role": "x", "content": "y"}]}, "messages[0].role: Invalid value: 'x'. Supported values are: "
         "'user', 'assistant' and 'system'."),
        ({"tools": [{"name": "f", "input_schema": []}]},
         "Invalid type for 'tools[0].input_schema': expected an object, but got an array instead."),
        ({"max_token": 5}, "Unknown parameter: 'max_token'. Did you mean 'max_tokens'?"),
    ):  # fmt: skip
        assert check(http.post("/v1/messages", json={**ASKED, **fields}), *INVALID) == words
    without = {key: value for key, value in ASKED.items() if key != "max_tokens"}
    assert "'max_tokens'" in check(http.post("/v1/messages", json=without), *INVALID)
    assert http.post("/v1/messages/count_tokens", json=without).status_code == 200
    assert "'max_tokens'" in check(http.post("/v1/messages/count_tokens", json=ASKED), *INVALID)


def test_unknown_fields_can_be_passed_over(serve: Callable[[Settings], str]) -> None:
    url = serve(app_settings(unknown_fields="warn", access_log=False))
    response = httpx.post(f"{url}/v1/messages", json={**ASKED, "novelty": 1})
    assert response.status_code == 200
    assert "novelty" in response.headers["x-inferd-warning"]


def test_no_message_is_longer_than_any(http: httpx.Client) -> None:
    long = {"role": "user", "content": [{"type": "text", "text": "x", "y" * 100_000: 1}]}
    assert len(http.post("/v1/messages", json={**ASKED, "messages": [long]}).content) < 2_500


def test_what_is_passing_is_retried(http: httpx.Client, router: Any) -> None:
    assert anthropic_errors.OVERLOADED in RETRIED
    router.state = State.STOPPED
    check(http.post("/v1/messages", json=ASKED), 529, "overloaded_error")
    assert http.post("/v1/messages/count_tokens", json={"messages": ASKED["messages"]}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_is_kept(http: httpx.Client, router: Any, script: Any, stream: bool) -> None:
    router.will(script(text="" if stream else "some words", token_ids=() if stream else None, ends=False))
    headers = {"X-Request-Timeout": "0.05"}
    response = http.post("/v1/messages", json={**ASKED, "stream": stream}, headers=headers)
    if stream:
        start, ping, failure = response.content.split(b"\n\n")[:-1]
        assert start.startswith(b"event: message_start\n") and ping.startswith(b"event: ping\n")
        assert failure.startswith(b"event: error\n") and b"timeout_error" in failure
    else:
        check(response, 408, "timeout_error")
    router.wait_for(lambda: list(router.aborted.values()) == ["abort"])


KEYS = ("first-key", "second-key")


@pytest.fixture
def locked(serve: Callable[[Settings], str]) -> str:
    return serve(app_settings(api_key=KEYS, admin_key=("admin-key",), access_log=False))


Pairs = list[tuple[str, str]]
BEARER, OWN = ("Authorization", "Bearer first-key"), ("x-api-key", "first-key")


TAKEN: list[Pairs] = [
    [OWN], [BEARER], [OWN, BEARER], [OWN, OWN], [("x-api-key", "admin-key")], [("X-API-Key", "second-key")],
    [("Authorization", "Basic xyz"), OWN],
]  # fmt: skip
REFUSED: list[Pairs] = [
    [], [("x-api-key", "")], [("x-api-key", "wrong")], [("x-api-key", "first-key2")], [("Authorization", "Bearer")],
    [("x-api-key", "Bearer first-key")], [OWN, ("Authorization", "Bearer wrong")], [OWN, ("x-api-key", "second-key")],
    [BEARER, ("Authorization", "Bearer second-key")], [("x-api-key", "first-key,second-key")],
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_key_is_taken_from_either_header(locked: str, path: str) -> None:
    fields = ASKED if path == "/v1/messages" else {"messages": ASKED["messages"]}
    for headers in TAKEN:
        assert httpx.post(locked + path, json=fields, headers=headers).status_code == 200, headers


@pytest.mark.parametrize("path", PATHS)
def test_no_or_a_wrong_or_a_second_key_is_refused(locked: str, router: Any, path: str) -> None:
    for headers in REFUSED:
        response = httpx.post(locked + path, json=ASKED, headers=headers)
        assert "key" in check(response, 401, "authentication_error"), headers
        assert response.headers["www-authenticate"] == "Bearer"
        assert "first-key" not in response.text
    assert router.submits == []


def test_anthropics_header_opens_nothing_else(locked: str) -> None:
    assert httpx.get(f"{locked}/v1/models", headers=[OWN]).status_code == 401
    assert httpx.get(f"{locked}/v1/models", headers=[BEARER, ("x-api-key", "wrong")]).status_code == 200
    twice = [BEARER, ("Authorization", "Bearer second-key")]
    assert httpx.get(f"{locked}/v1/models", headers=twice).status_code == 401
    assert httpx.get(f"{locked}/v1/models", headers=[BEARER, BEARER]).status_code == 200


def test_a_key_is_one_tenant_whichever_header_it_came_in(locked: str, router: Any) -> None:
    for header in (OWN, BEARER):
        httpx.post(f"{locked}/v1/messages", json=ASKED, headers=[header])
    httpx.post(f"{locked}/v1/chat/completions", json={"messages": ASKED["messages"]}, headers=[BEARER])
    httpx.post(f"{locked}/v1/messages", json=ASKED, headers=[("x-api-key", "second-key")])
    mine, same, chats, other = [submit.scheduling.cache_salt for submit in router.submits]
    assert mine == same == chats != other
