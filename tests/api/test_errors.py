"""Every row of the error table, over the socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.config.settings import Settings
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.errors import messages as errors
from inferd.server.errors import table
from tests.api.conftest import app_settings

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
LIMIT = 256


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, checked to have the shape of all errors."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert len(response.content) < 2_000
    return dict(body["error"])


def chat(**fields: Any) -> dict[str, Any]:
    return {**CHAT, **fields}


CASES: list[tuple[str, dict[str, Any], int, str, str | None, str]] = [
    ("model", chat(model="gpt-4"), 404, "model_not_found", "model", "The model `gpt-4` does not exist"),
    ("context", {**TEXT, "prompt": [1] * 300}, 400, "context_length_exceeded", "prompt", "is 256 tokens"),
    ("too large", chat(n=129), 400, "integer_above_max_value", "n", "Expected a value <= 128, but got 129 instead."),
    ("larger than the model's context", chat(max_tokens=10**30, min_tokens=10**29), 400, "integer_above_max_value",
     "min_tokens", "shorten the prompt"),
    ("too small", chat(max_tokens=0), 400, "integer_below_min_value", "max_tokens", "Expected a value >= 1"),
    ("decimal too large", chat(temperature=2.1), 400, "decimal_above_max_value", "temperature", "<= 2, but got 2.1"),
    ("decimal too small", chat(top_p=-0.1), 400, "decimal_below_min_value", "top_p", ">= 0, but got -0.1"),
    ("type", chat(max_tokens="5"), 400, "invalid_type", "max_tokens", "expected an integer, but got a string"),
    ("whole numbers only", chat(n=1.5), 400, "invalid_type", "n", "but got a decimal number"),
    ("no number", chat(n=True), 400, "invalid_type", "n", "but got a boolean"),
    ("missing", {"model": "tiny"}, 400, "missing_required_parameter", "messages", "Missing required parameter"),
    ("missing within", chat(messages=[{"content": "x"}]), 400, "missing_required_parameter", "messages[0].role", ""),
    ("missing content", chat(messages=[{"role": "user"}]), 400, "missing_required_parameter",
     "messages[0].content", "Missing required parameter: 'messages[0].content'."),
    ("unknown", chat(foo=1), 400, "unknown_parameter", "foo", "Unknown parameter: 'foo'."),
    ("misspelt", chat(temprature=1), 400, "unknown_parameter", "temprature", "Did you mean 'temperature'?"),
    ("unknown within", chat(messages=[{"role": "user", "content": "", "x": 1}]), 400, "unknown_parameter",
     "messages[0].x", "Unknown parameter: 'messages[0].x'."),
    ("not served", chat(audio={}), 400, "unsupported_parameter", "audio", "not supported"),
    ("renamed", chat(guided_json={}), 400, "unsupported_parameter", "guided_json", "'structured_outputs'"),
    ("suffix", {**TEXT, "suffix": "x"}, 400, "unsupported_parameter", "suffix", "no tokens for filling in the middle"),
    ("best_of", {**TEXT, "best_of": 2}, 400, "unsupported_value", "best_of", "'n'"),
    ("a format nobody has", chat(response_format={"type": "xml"}), 400, "invalid_value",
     "response_format.type", "'json_schema'"),
    ("tool choice", chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="always"), 400,
     "invalid_value", "tool_choice", "'auto'"),
    ("image", chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), 400,
     "unsupported_value", "messages[0].content[0].type", "say as a text what it shows"),
    ("audio", chat(messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}]), 400,
     "unsupported_value", "messages[0].content[0].type", "does not support 'input_audio'"),
    ("image behind an answer", chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {
        "role": "user", "content": [{"type": "text", "text": "z"}, {"type": "video_url"}]}]), 400,
     "unsupported_value", "messages[2].content[1].type", "does not support 'video_url'"),
    ("image of a system", chat(messages=[{"role": "system", "content": [{"type": "file", "file": {}}]},
                                         {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]), 400,
     "unsupported_value", "messages[0].content[0].type", "does not support 'file'"),
    ("a part that nobody has", chat(messages=[{"role": "user", "content": [{"type": "smell"}]}]), 400,
     "unsupported_value", "messages[0].content[0].type", "Only 'text' parts are served: this server reads no images"),
    ("role", chat(messages=[{"role": "bot", "content": "x"}]), 400, "invalid_value", "messages[0].role", "'bot'"),
    ("no messages", chat(messages=[]), 400, "empty_array", "messages", "minimum length 1"),
    ("no prompt", {"prompt": []}, 400, "empty_array", "prompt", "minimum length 1"),
    ("empty prompt", {"prompt": ""}, 400, "invalid_value", "prompt", "no tokens"),
    ("empty stop", chat(stop=""), 400, "empty_string", "stop", "minimum length 1"),
    ("many stops", chat(stop=["x"] * 17), 400, "array_above_max_length", "stop", "maximum length 16"),
    ("long salt", chat(cache_salt="x" * 1_025), 400, "string_above_max_length", "cache_salt", "1024"),
    ("too many choices", {"prompt": [[1]] * 100, "n": 100}, 400, "request_exceeds_work_limit", "n", "2048"),
    ("id beyond the vocabulary", {"prompt": [1, 99_999]}, 400, "integer_above_max_value", "prompt[1]", "<= 3071"),
    ("negative id", {"prompt": [[5], [1, -1]]}, 400, "integer_below_min_value", "prompt[1][1]", ">= 0"),
    ("mixed prompt", {"prompt": [1, "a"]}, 400, "invalid_type", "prompt[1]", "an integer"),
    ("prompt of objects", {"prompt": [{}]}, 400, "invalid_type", "prompt", "one of a string"),
    ("bias", chat(logit_bias={"1": 101}), 400, "decimal_above_max_value", "logit_bias.1", "<= 100"),
    ("bias of no token", chat(logit_bias={"x": 1}), 400, "invalid_value", "logit_bias", "token ids"),
    ("a template of one's own", chat(chat_template="{{ 1 }}"), 400, "unsupported_parameter", "chat_template", "own"),
    ("seed", chat(seed=2**63), 400, "integer_above_max_value", "seed", str(2**63 - 1)),
    ("huge number", chat(seed=10**400), 400, "integer_above_max_value", "seed", "77 digits"),
    ("arguments", chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}]),
     400, "invalid_type", "messages[0].tool_calls[0].function.arguments", "a string"),
    ("two ways at once", chat(structured_outputs={"regex": "a", "choice": ["b"]}), 400, "invalid_value",
     "structured_outputs", "it has 'regex' and 'choice'. Expected exactly one of json, "),
    ("no way at all", chat(structured_outputs={}), 400, "invalid_value", "structured_outputs", "none of its keys"),
    ("sound", chat(modalities=["text", "audio"]), 400, "unsupported_value", "modalities",
     """does not support ["text", "audio"]. Only ["text"] is served."""),
    ("older functions", chat(functions=[{"name": "f"}]), 400, "unsupported_value", "functions",
     "does not support an array of 1 item. Only an empty list is accepted: use 'tools' instead."),
    ("a long list", chat(plugins=["a"] * 9), 400, "unsupported_value", "plugins", "an array of 9 items. Only an empty"),
    ("an older call of a user", chat(messages=[{"role": "user", "content": "x", "function_call": {"name": "f"}}]), 400,
     "invalid_value", "messages[0].function_call", "'assistant'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status", "code", "param", "words"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_refusal_names_the_field_the_value_and_the_rule(
    http: httpx.Client, router: Any, body: dict[str, Any], status: int, code: str, param: str | None, words: str
) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    for stream in (False, True):
        response = http.post(path, json={**body, "stream": stream})
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (status, code, param)
        assert words in error["message"]
        assert error["type"] == "invalid_request_error"
    assert router.submits == []


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "Expecting value"),
        (b"{", "line 1 column 2"),
        (b'{"a": 1,}', "line 1"),
        (b"[]", "expected an object, but got an array"),
        (b"null", "but got null"),
        (b'{"model": "tiny", "model": "tiny"}', "'model' appears twice"),
        (b'{"logit_bias": {"1": 1, "1": 2}}', "'1' appears twice"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"prompt": "\xff"}', "byte 12 is not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "BOM"),
        (b'{"n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"n": ' + b"1" * 5_000 + b"}", "digits"),
    ],
)
def test_what_is_no_json(http: httpx.Client, raw: bytes, words: str) -> None:
    response = http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, None, None)
    assert error["message"].startswith("We could not parse the JSON body of your request.")
    assert words in error["message"]


CHAT_MEANT = "Did you mean POST /v1/chat/completions?"
ONE_V1 = "The base URL of an OpenAI client ends in one /v1."
WRONG_PATHS = [
    # (method, path, what the message adds)
    ("POST", "/chat/completions", f"{CHAT_MEANT} {ONE_V1}"),
    ("POST", "/v1/v1/chat/completions", f"{CHAT_MEANT} {ONE_V1}"),
    ("POST", "/v1/chat/completions/chat/completions", f"{CHAT_MEANT} {ONE_V1}"),
    ("POST", "/openai/deployments/gpt/chat/completions", f"{CHAT_MEANT} {ONE_V1}"),
    ("GET", "/chat/completions", f"{CHAT_MEANT} {ONE_V1}"),
    ("POST", "/v1/chat/completions/", CHAT_MEANT),
    ("POST", "/v1/chat/completion", CHAT_MEANT),
    ("POST", "/v1/v1/messages", "Did you mean POST /v1/messages? The base URL of an Anthropic client has no /v1."),
    ("POST", "/v1/messages/", "Did you mean POST /v1/messages?"),
    ("POST", "/messages", "Did you mean POST /v1/messages?"),
    ("POST", "/api/chat", f"{CHAT_MEANT} {ONE_V1}"),
    ("GET", "/v1/api/tags", "Did you mean GET /api/tags?"),
    ("GET", "/models", f"Did you mean GET /v1/models? {ONE_V1}"),
    ("GET", "/responses/resp_1", f"Did you mean GET /v1/responses/resp_1? {ONE_V1}"),
    ("GET", "/v1/health", "Did you mean GET /health?"),
    ("POST", "/v1/nothing", ""),
    ("POST", "/" + "x/" * 90 + "chat/completions", ""),
    ("POST", "/..x", ""),
]


@pytest.mark.parametrize(("method", "path", "words"), WRONG_PATHS)
def test_a_path_that_does_not_exist_names_the_route_that_was_likely_meant(
    http: httpx.Client, method: str, path: str, words: str
) -> None:
    response = http.request(method, path, json=None if method == "GET" else CHAT)
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    head = f"Invalid URL ({method} {errors.clip(path, errors.MAX_ECHO)})"
    assert message == (f"{head}. {words}" if words else head)


def test_infinity_by_another_way(http: httpx.Client) -> None:
    """1e400 is valid JSON, but not a float."""
    raw = b'{"prompt": "x", "temperature": 1e400}'
    response = http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert "1e400 is too large" in error_of(response)["message"]


def test_routes_methods_and_content_types(http: httpx.Client) -> None:
    response = http.post("/v1/nothing", json={})
    assert (response.status_code, error_of(response)["message"]) == (404, "Invalid URL (POST /v1/nothing)")
    response = http.get("/v1/chat/completions")
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_supported")
    assert response.headers["allow"] == "POST"
    response = http.get("/v1/responses", headers={"Connection": "Upgrade", "Upgrade": "websocket"})
    assert (response.status_code, error_of(response)["code"]) == (426, "websocket_not_supported")
    assert (response.headers["allow"], response.headers["upgrade"]) == ("POST", "HTTP/1.1")
    for name in ("resp_x", "%0a"):
        assert http.post(f"/v1/responses/{name}").headers["allow"] == "DELETE, GET, HEAD"
    for path, allowed in (("/v1/models/a/b", "GET, HEAD"), ("/v1/models/a/b/load", "POST")):
        assert http.options(path).headers["allow"] == allowed
    assert http.post("/v1/models").status_code == 405
    assert http.get("/redoc").status_code == 404
    response = http.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_content_type")
    for media_type in ("application/json; charset=utf-8", "application/vnd.api+json"):
        accepted = http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": media_type})
        assert accepted.status_code == 200
    assert http.get(f"/{'x' * 5_000}").status_code == 404


def test_a_body_that_is_too_large_is_refused_by_its_length_or_as_it_grows(
    serve: Callable[[Settings], str], router: Any
) -> None:
    url = serve(app_settings(max_body_bytes=1_000, access_log=False))
    large = b'{"prompt": "' + b"x" * 2_000 + b'"}'
    headers = {"Content-Type": "application/json"}
    stated = httpx.post(f"{url}/v1/completions", content=large, headers=headers)
    chunked = httpx.post(f"{url}/v1/completions", content=iter([large[:900], large[900:]]), headers=headers)
    for response in (stated, chunked):
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
        assert "1000 bytes" in error_of(response)["message"]
    assert router.submits == []


def test_a_body_that_does_not_come_is_not_waited_for(serve: Callable[[Settings], str]) -> None:
    url = urlsplit(serve(app_settings(access_log=False), body_idle_s=0.05))
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=20) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in client.recv(65536)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_cannot_take_more_says_when_to_come_back(
    http: httpx.Client, router: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    router.refusal = RequestError("server_is_overloaded", "2048 requests are waiting.")
    refused = http.post(path, json={**body, "stream": stream, "n": 2})
    router.refusal, router.state = None, State.STOPPED
    unready = http.post(path, json={**body, "stream": stream})
    for response in (refused, unready):
        error = error_of(response)
        found = (response.status_code, error["type"], error["code"])
        assert found == (503, "service_unavailable_error", "server_is_overloaded")
        assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("is_leaving", "words"), [(False, "not ready"), (True, "shutting down")])
def test_who_is_sent_away_learns_whether_to_come_back_here(
    http: httpx.Client, router: Any, is_leaving: bool, words: str
) -> None:
    router.state, router.is_leaving = State.STOPPED, is_leaving
    for refused in (http.post("/v1/chat/completions", json=CHAT), http.get("/ready")):
        assert (refused.status_code, error_of(refused)["code"]) == (503, "server_is_overloaded")
        assert words in error_of(refused)["message"]
        assert int(refused.headers["retry-after"]) >= 1


def test_a_choice_that_is_not_taken_takes_the_others_back(http: httpx.Client, router: Any, script: Any) -> None:
    accept = router.submit

    def submit(given: Any, *, is_admitted: bool) -> Any:
        if len(router.submits) == 2:
            raise RequestError("rate_limit_exceeded", "Too many.")
        return accept(given, is_admitted=is_admitted)

    router.will(script(ends=False))
    router.submit = submit
    try:
        response = http.post("/v1/completions", json={**TEXT, "prompt": ["a", "b", "c"]})
    finally:
        del router.submit
    assert (response.status_code, error_of(response)["code"]) == (429, "rate_limit_exceeded")
    assert set(router.aborted) == {submit.request_id for submit in router.submits}


def test_an_unexpected_mistake_is_a_500_without_details(
    http: httpx.Client, router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def submit(given: Any, *, is_admitted: bool) -> Any:
        raise ZeroDivisionError("at /secret/path")

    router.submit = submit
    try:
        response = http.post("/v1/completions", json=TEXT)
    finally:
        del router.submit
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (500, "server_error", None)
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in caplog.text


def test_unknown_fields_can_be_ignored_with_a_warning(serve: Callable[[Settings], str]) -> None:
    url = serve(app_settings(unknown_fields="warn", access_log=False))
    for stream in (False, True):
        response = httpx.post(f"{url}/v1/completions", json={**TEXT, "foo": 1, "b\r\nar\u20ac": 2, "stream": stream})
        assert response.status_code == 200
        warning = response.headers["x-inferd-warning"]
        assert warning == r"Unknown parameters were ignored: 'foo', 'b\r\nar\u20ac'"
    refused = httpx.post(f"{url}/v1/completions", json={**TEXT, "suffix": "x"})
    assert refused.status_code == 400, "what is known and not served is refused all the same"


def test_the_official_client_sees_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=CHAT["messages"])
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=CHAT["messages"], temperature=9)
    assert bad.value.code == "decimal_above_max_value"
    assert bad.value.request_id


def test_every_row_that_a_request_can_reach_is_tested() -> None:
    """Together with the rows that other files test (limits, deadlines, keys), the table has no more rows."""
    here = {case[3] for case in CASES} | {"malformed_json", "invalid_url", "method_not_supported"}
    here |= {"websocket_not_supported"}
    here |= {"unsupported_content_type", "request_too_large", "server_is_overloaded", "rate_limit_exceeded"}
    here |= {"internal_error", "deadline_exceeded"}
    elsewhere = {"invalid_api_key", "engine_error", "numerical_error", "slow_down", "object_above_max_properties"}
    elsewhere |= {"insufficient_permissions", "not_implemented", "response_not_found", "previous_response_not_found"}
    elsewhere |= {"model_not_loaded", "model_is_busy", "model_is_asleep"}
    elsewhere |= {"malformed_http", "head_too_large", "request_exceeds_work_limit", "origin_not_allowed"}
    assert here | elsewhere == set(table.ROWS)


MISSPELT: list[tuple[str, dict[str, Any], str, str]] = [
    # (path, fields, param, likeliest name)
    ("chat/completions", {"messages": [{"role": "user", "contnt": "x"}]}, "messages[0].contnt", "content"),
    ("chat/completions", {"stream_options": {"include_usge": True}}, "stream_options.include_usge", "include_usage"),
    ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "parmeters": {}}}]},
     "tools[0].function.parmeters", "parameters"),
    ("chat/completions", {"stor": True}, "stor", "store"),
    ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"nme": "a", "schema": {}}}},
     "response_format.json_schema.nme", "name"),
    ("responses", {"messages": None, "input": [{"role": "user", "contents": "x"}]}, "input[0].contents", "content"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "near"), MISSPELT, ids=[case[2] for case in MISSPELT])
def test_a_misspelt_key_within_gets_the_likeliest_spelling(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str, near: str
) -> None:
    response = http.post(f"/v1/{path}", json={**CHAT, **fields})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, "unknown_parameter", param)
    assert error["message"] == f"Unknown parameter: '{param}'. Did you mean '{near}'?"


def flat_tool(**format_fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", **format_fields}}}


OTHER_SHAPES: list[tuple[str, dict[str, Any], str, str]] = [
    # (route, fields, param, way out)
    ("responses", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", "beside 'type'"),
    ("responses", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].custom", "beside 'type'"),
    ("responses", {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "grammar": {}}}]},
     "tools[0].format.grammar", "beside 'type'"),
    ("responses", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function",
     "beside 'type'"),
    ("responses", {"text": {"format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}},
     "text.format.json_schema", "beside 'type'"),
    ("chat/completions", {"tools": [{"type": "function", "name": "f"}]}, "tools[0].name", "into 'function'"),
    ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f", "input_schema": {}}}]},
     "tools[0].function.input_schema", "'parameters'"),
    ("chat/completions", {"tools": [{"type": "custom", "name": "f"}]}, "tools[0].name", "into 'custom'"),
    ("chat/completions", {"tools": [flat_tool(syntax="lark", definition="x")]}, "tools[0].custom.format.syntax",
     "into 'grammar'"),
    ("chat/completions", {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "into 'function'"),
    ("chat/completions", {"response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema",
     "into 'json_schema'"),
    ("chat/completions", {"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema",
     "'json_schema'"),
    ("chat/completions", {"max_output_tokens": 5}, "max_output_tokens", "'max_completion_tokens'"),
    ("chat/completions", {"stop_sequences": ["x"]}, "stop_sequences", "'stop'"),
    ("chat/completions", {"system": "x"}, "system", "role 'system'"),
    ("chat/completions", {"prompt": "x"}, "prompt", "/v1/completions"),
    ("chat/completions", {"thinking": {"type": "enabled"}}, "thinking", "'reasoning_effort'"),
    ("chat/completions", {"json_schema": {}}, "json_schema", "'response_format'"),
    ("completions", {}, "messages", "/v1/chat/completions"),
    ("messages", {"tools": [{"name": "f", "parameters": {}}]}, "tools[0].parameters", "'input_schema'"),
    ("messages", {"stop": ["x"]}, "stop", "'stop_sequences'"),
    ("messages", {"max_completion_tokens": 5}, "max_completion_tokens", "'max_tokens'"),
    ("messages", {"response_format": {"type": "json_object"}}, "response_format", "'output_config'"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "fields", "param", "way_out"), OTHER_SHAPES)
def test_the_shape_of_another_api_gets_the_way_out(
    http: httpx.Client, router: Any, route: str, fields: dict[str, Any], param: str, way_out: str
) -> None:
    base = {"model": "tiny", "input": "x"} if route == "responses" else CHAT
    response = http.post(f"/v1/{route}", json={**base, **({"max_tokens": 5} if route == "messages" else {}), **fields})
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and router.submits == []
    begin, end = message.split(" is not supported by this server. ")
    assert begin == f"Unsupported parameter: '{param}'" and way_out in end


def test_one_answer_of_the_best_is_every_answer(http: httpx.Client) -> None:
    assert http.post("/v1/chat/completions", json=chat(best_of=1)).status_code == 200
    error = error_of(http.post("/v1/chat/completions", json=chat(best_of=2)))
    assert error["code"] == "unsupported_value" and "Use 'n'" in error["message"]
