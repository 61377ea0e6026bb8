"""The error table on the wire, byte for byte: every row before a stream, inside one, and plain."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Failure
from inferd.server.config.settings import Settings
from inferd.server.errors import messages as errors
from inferd.server.errors import table
from tests.api.conftest import app_settings

REFUSED, BROKEN, BUSY = "invalid_request_error", "server_error", "service_unavailable_error"
BAD = (
    "array_above_max_length", "context_length_exceeded", "decimal_above_max_value", "decimal_below_min_value",
    "empty_array", "empty_string", "integer_above_max_value", "integer_below_min_value", "invalid_type",
    "invalid_value", "missing_required_parameter", "object_above_max_properties", "string_above_max_length",
    "unknown_parameter", "unsupported_parameter", "unsupported_value", "previous_response_not_found",
    "request_exceeds_work_limit",
)  # fmt: skip

EXPECTED: dict[str, tuple[int, str, str | None]] = {
    **{code: (400, REFUSED, code) for code in BAD},
    "malformed_json": (400, REFUSED, None),
    "malformed_http": (400, REFUSED, None),
    "invalid_api_key": (401, "authentication_error", "invalid_api_key"),
    "insufficient_permissions": (403, REFUSED, "insufficient_permissions"),
    "origin_not_allowed": (403, REFUSED, "origin_not_allowed"),
    "invalid_url": (404, REFUSED, None),
    "model_not_found": (404, REFUSED, "model_not_found"),
    "response_not_found": (404, REFUSED, "response_not_found"),
    "method_not_supported": (405, REFUSED, "method_not_supported"),
    "deadline_exceeded": (408, "timeout_error", "deadline_exceeded"),
    "model_is_busy": (409, REFUSED, "model_is_busy"),
    "request_too_large": (413, REFUSED, "request_too_large"),
    "unsupported_content_type": (415, REFUSED, "unsupported_content_type"),
    "websocket_not_supported": (426, REFUSED, "websocket_not_supported"),
    "rate_limit_exceeded": (429, "rate_limit_error", "rate_limit_exceeded"),
    "slow_down": (429, "rate_limit_error", "slow_down"),
    "head_too_large": (431, REFUSED, "head_too_large"),
    "internal_error": (500, BROKEN, None),
    "engine_error": (500, BROKEN, "engine_error"),
    "numerical_error": (500, BROKEN, "numerical_error"),
    "not_implemented": (501, BROKEN, "not_implemented"),
    "model_is_asleep": (503, BUSY, "model_is_asleep"),
    "model_not_loaded": (503, BUSY, "model_not_loaded"),
    "server_is_overloaded": (503, BUSY, "server_is_overloaded"),
}
"""Our code -> (status, type, code on the wire), as OpenAI's clients know them."""

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}


def body_of(code: str, param: str | None) -> bytes:
    _, kind, wire_code = EXPECTED[code]
    wire = {"message": "Some words.", "type": kind, "param": param, "code": wire_code}
    return json.dumps({"error": wire}, separators=(",", ":")).encode()


def test_the_table_has_these_rows() -> None:
    assert {code: (row.status, row.type, row.wire_code) for code, row in table.ROWS.items()} == EXPECTED
    assert all(row.about for row in table.ROWS.values())


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("code", EXPECTED)
def test_a_refusal_byte_for_byte(http: httpx.Client, router: Any, code: str, path: str) -> None:
    for param in (None, "messages[1].content[0].text"):
        for stream in (False, True):
            router.refusal = RequestError(code, "Some words.", param)
            response = http.post(path, json={**ASKED[path], "stream": stream})
            assert (response.status_code, response.content) == (EXPECTED[code][0], body_of(code, param))
            assert response.headers["content-type"] == "application/json"
            assert response.headers["x-request-id"]
            check_headers(response, table.ROWS[code].retry_after_s)


def check_headers(response: httpx.Response, wait_s: float | None = 1.0) -> None:
    """`wait_s`: the shortest wait that the answer may name, half of the longest; None: it names none."""
    headers = response.headers
    assert headers.get("www-authenticate") == ("Bearer" if response.status_code == 401 else None)
    codes = b'"model_not_loaded"', b'"model_is_asleep"'
    is_final = response.status_code == 501 or any(code in response.content for code in codes)
    assert headers.get("x-should-retry") == ("false" if is_final else None)
    if response.status_code in (429, 503) and not is_final:
        wait_ms = int(headers["retry-after-ms"])
        assert wait_s is not None and wait_s * 1_000 <= wait_ms <= wait_s * 2_000
        assert (int(headers["retry-after"]) - 1) * 1_000 < wait_ms <= int(headers["retry-after"]) * 1_000
    else:
        assert "retry-after" not in headers
        assert "retry-after-ms" not in headers


def test_callers_refused_together_do_not_come_back_together(http: httpx.Client, router: Any) -> None:
    router.refusal = RequestError("server_is_overloaded", "x")
    waits = {http.post("/v1/completions", json={"prompt": "hi"}).headers["retry-after-ms"] for _ in range(20)}
    assert len(waits) > 5


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("code", EXPECTED)
def test_a_failure_inside_a_stream_byte_for_byte(
    http: httpx.Client, router: Any, script: Any, code: str, path: str
) -> None:
    router.will(script(text="some text", failure=Failure(code, "Some words.", "seed")))
    response = http.post(path, json={**ASKED[path], "stream": True})
    assert response.status_code == 200
    events = response.content.split(b"\n\n")
    assert events[-2:] == [b"data: " + body_of(code, "seed"), b""], "the last event, and nothing after it"
    assert b"choices" in events[0]
    plain = http.post(path, json=ASKED[path])
    assert (plain.status_code, plain.content) == (EXPECTED[code][0], body_of(code, "seed"))


def test_a_code_that_nobody_knows_is_a_500_without_its_words(http: httpx.Client, router: Any) -> None:
    router.refusal = RequestError("no_such_code", "Some words.")
    response = http.post("/v1/completions", json={"prompt": "hi"})
    assert (response.status_code, response.json()["error"]["type"]) == (500, BROKEN)


@pytest.mark.parametrize(
    "fields",
    [
        {f"field_{i}": i for i in range(10_000)},
        {"x" * 100_000: 1},
        {"stop": ["x" * 5_000] * 16},
        {"messages": [{"role": "r" * 50_000, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "\u4e2d" * 50_000}]}]},
        {"logit_bias": {"9" * 90_000: 1}},
        {"tools": [{"type": "function", "function": {"name": "\n" * 60_000}}]},
        {"model": "m" * 100_000},
        {"seed": -(10**4_000)},
    ],
)
def test_a_thousand_mistakes_are_one_short_error(http: httpx.Client, fields: dict[str, Any]) -> None:
    """Only one mistake is reported, with at most 200 characters of the request."""
    response = http.post("/v1/chat/completions", json={**ASKED["/v1/chat/completions"], **fields})
    assert 400 <= response.status_code < 500
    assert set(response.json()) == {"error"}
    assert len(response.content) < 2_500
    assert len(response.json()["error"]["message"]) <= errors.MAX_MESSAGE
    assert len(response.json()["error"]["param"] or "") <= errors.MAX_ECHO


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": 1}]}]},
         "messages[1].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]},
         "messages[0].tool_calls[0].function.name"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logit_bias": {"7": "x"}}, "logit_bias.7"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"repetition_detection": {"max_pattern_size": 4, "min_count": "2"}}, "repetition_detection.min_count"),
    ],
)  # fmt: skip
def test_param_is_the_path_of_what_is_wrong(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post("/v1/chat/completions", json={**ASKED["/v1/chat/completions"], **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_type", param)


def test_no_body_is_waited_for_where_the_key_is_wrong(serve: Callable[[Settings], str], router: Any) -> None:
    url = serve(app_settings(api_key=("right",), access_log=False))
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "hi"}, headers={"Authorization": "Bearer wrong"})
    assert response.content == (
        b'{"error":{"message":"Incorrect API key provided.","type":"authentication_error","param":null,'
        b'"code":"invalid_api_key"}}'
    )
    check_headers(response)


WAIT_S = 300.0
EVERY_FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": ("/v1/messages", {"max_tokens": 4, "model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
}
ASKS = {
    **EVERY_FAMILY,
    **{f"{name}, streamed": (path, {**body, "stream": True}) for name, (path, body) in EVERY_FAMILY.items()},
    "responses in the background": ("/v1/responses", {"input": "hi", "background": True}),
    "embeddings": ("/v1/embeddings", {"input": "hi"}),
    "rerank": ("/v1/rerank", {"query": "hi", "documents": ["hi"]}),
    "classify": ("/v1/classify", {"input": "hi"}),
}


@pytest.mark.parametrize(("path", "body"), ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("where", ["intake", "router", "engine"])
@pytest.mark.parametrize("code", ["rate_limit_exceeded", "server_is_overloaded"])
def test_every_family_says_when_to_come_back(
    http: httpx.Client,
    router: Any,
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    where: str,
    code: str,
) -> None:
    """The wait of a refusal reaches the client, wherever the refusal comes from."""
    refusal = RequestError(code, "Later.", "prompt", retry_after_s=WAIT_S)

    def refuse(*_: object) -> None:
        raise refusal

    if where == "intake":
        monkeypatch.setattr(router, "check_queue", refuse)
    elif where == "router":
        router.refusal = refusal
    else:
        router.will(script(token_ids=(), failure=Failure(code, "Later.", "prompt", WAIT_S)))
    answer = http.post(path, json=body)
    if where == "engine" and "background" in body:
        assert answer.json()["status"] == "queued", "it has begun before the engine refuses it"
        return
    if where == "engine" and body.get("stream") and path in ("/v1/responses", "/v1/messages"):
        assert "event: error\n" in answer.text, "so has this stream"
        return
    assert answer.status_code in (429, 503, 529), answer.text
    assert WAIT_S <= int(answer.headers["retry-after"]) <= 2 * WAIT_S + 1


def test_a_model_that_is_not_served_names_those_that_are() -> None:
    few = errors.model_not_found("x", ("a", "b", "a")).message
    assert few.endswith("This server serves `a`, `b`.")
    many = errors.model_not_found("x" * 1_000, [f"{'n' * 60}{i}" for i in range(100)]).message
    assert many.endswith("`, 94 more, which GET /v1/models lists.") and len(many) < errors.MAX_MESSAGE
    assert errors.model_not_found("x", ["y" * 1_000]).message.count("y") < errors.MAX_ECHO
