"""Strings of a body that contain JSON are read like a body, in every family of routes. A schema is refused if it cannot
be read. Arguments of a call are a model's own words, so that they stay a text."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from inferd.server.schema.chat_messages import arguments_of
from inferd.server.schema.strict_json import MAX_ARRAYS, MAX_DEPTH, Counts
from tests.api.conftest import (
    ScriptedRouter,
    calm_loop,
    http,
    model,
    router,
    shared_beats,
    shared_router,
    shared_url,
    url,
)

__all__ = ["calm_loop", "http", "model", "router", "shared_beats", "shared_router", "shared_url", "url"]

HOSTILE = {
    "half a surrogate pair": r'{"a": "\ud800"}',
    "the other half": r'{"a": "\udc00"}',
    "halves in the wrong order": r'{"a": "\udc00\ud800"}',
    "half as a key": r'{"\ud800": 1}',
    "half, deep inside": r'{"a": [[{"b": "\ud800"}]]}',
    "NaN": '{"a": NaN}',
    "Infinity": '{"a": [-Infinity]}',
    "a number beyond floating point": '{"a": 1e999}',
    "more digits than are read": '{"a": ' + "9" * 5_000 + "}",
    "deep": '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}",
    "brackets without end": '{"a": ' + "[" * 100_000,
    "many arrays": '{"a": [' + "[]," * MAX_ARRAYS + "1]}",
    "a key twice": '{"a": 1, "a": 2}',
    "no object": "[1]",
    "no JSON": "{'a': 1}",
    "a byte order mark": '\ufeff{"a": 1}',
}
USER = {"role": "user", "content": "hi"}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def turns(*arguments: str) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": "", "tool_calls": list(map(call, arguments))}, USER]


def items(*arguments: str) -> list[dict[str, Any]]:
    return [USER, *({"type": "function_call", "call_id": "c", "name": "f", "arguments": text} for text in arguments)]


def ask(http: httpx.Client, family: str, *texts: str) -> httpx.Response:
    match family:
        case "chat":
            return http.post("/v1/chat/completions", json={"messages": turns(*texts)})
        case "chat rendered":
            return http.post("/v1/chat/completions/render", json={"messages": turns(*texts)})
        case "tokenize":
            return http.post("/tokenize", json={"messages": turns(*texts)})
        case "responses":
            return http.post("/v1/responses", json={"input": items(*texts)})
        case _:
            return http.post("/v1/completions", json={"prompt": "hi", "structured_outputs": {"json": texts[0]}})


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_schema_is_read_like_a_body(http: httpx.Client, text: str) -> None:
    answer = ask(http, "completions", text)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 2_000


@pytest.mark.parametrize("family", ["chat", "chat rendered", "tokenize", "responses"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_arguments_that_cannot_be_read_stay_as_they_are(
    http: httpx.Client, router: ScriptedRouter, family: str, text: str
) -> None:
    answer = ask(http, family, text)
    if len(text) > 250 and family != "tokenize":
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        return
    assert answer.status_code == 200, answer.text
    if family in ("chat", "responses"):
        assert text in router.model.tokenizer.decode(router.submits[0].prompt_ids, skip_special=False)


def test_many_strings_are_parsed_no_further_than_one_body() -> None:
    """Each string is within the bounds, but all together exceed them."""
    text = '{"a": [' + "[]," * (MAX_ARRAYS // 8) + "1]}"
    counts = Counts()
    assert [type(arguments_of(text, counts)) for _ in range(9)] == [dict] * 7 + [str] * 2


@pytest.mark.parametrize("family", ["chat", "responses"])
def test_what_a_model_may_write_is_read(http: httpx.Client, family: str) -> None:
    for value in ({}, {"a": "\U0001f600 \u4e2d\n"}, {"a": [1, -2.5e-3, None, True, {"b": "\\ud800"}]}):
        for ascii_only in (True, False):
            answer = ask(http, family, json.dumps(value, ensure_ascii=ascii_only))
            assert answer.status_code == 200, answer.text


NUMBERS = ("1e999", "-1e999", "NaN", "Infinity", "-Infinity")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_body_holds_finite_numbers_alone(http: httpx.Client, number: str) -> None:
    bodies = (
        '{"prompt": "x", "temperature": %s}',
        '{"prompt": "x", "logit_bias": {"1": %s}}',
        '{"prompt": "x", "structured_outputs": {"json": {"maximum": %s}}}',
        '{"prompt": "x", "seed": %s}',
    )
    for body in bodies:
        answer = http.post("/v1/completions", content=body % number, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, None), answer.text


@pytest.mark.parametrize("header", ["X-Request-Timeout", "X-SLO-TTFT-Ms", "X-SLO-TPOT-Ms"])
@pytest.mark.parametrize("number", [str(math.nan), "inf", "-inf", "1e999", "-nan"])
def test_so_do_headers(http: httpx.Client, header: str, number: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x"}, headers={header: number})
    assert answer.status_code == 400, answer.text
