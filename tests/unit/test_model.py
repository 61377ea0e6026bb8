"""Reading requests: which of several faults an error names, which unknown names are ignored, how many errors."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from inferd.engine.api.errors import RequestError
from inferd.server.errors import validation
from inferd.server.schema.anthropic import MessagesRequest
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.json_schema import schema_of
from inferd.server.schema.request_model import RequestModel, read
from inferd.server.schema.responses import ResponsesRequest
from inferd.server.schema.tokenize import TokenizeRequest

ASK = {"role": "user", "content": "x"}
HI = {"messages": [ASK]}


def refusal(
    model: type[RequestModel], body: dict[str, Any], ignored: list[str] | None = None
) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        read(model, body, ignored)
    return caught.value.code, caught.value.param


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"n": 0, "nonsense": 1, "foo": 2}, "unknown_parameter", "nonsense"),
        ({"n": 0, "guided_json": {}, "foo": 2}, "unsupported_parameter", "guided_json"),
        ({"n": 0, "temperature": "x"}, "invalid_type", "temperature"),
        ({"n": 0}, "integer_below_min_value", "n"),
        ({**HI, "rid": 5}, "invalid_type", "rid"),
        ({**HI, "rid": "a", "request_id": "b", "foo": 1}, "invalid_value", "rid"),
        ({"top_logprobs": 99}, "missing_required_parameter", "messages"),
        ({**HI, "stop": ["a", 1, ""]}, "invalid_type", "stop[1]"),
        ({**HI, "stop": [""] * 17}, "array_above_max_length", "stop"),
        ({**HI, "stream_options": {"include_usage": 1, "x": 2}}, "unknown_parameter", "stream_options.x"),
        ({**HI, "tools": [{"type": "function", "function": {}, "x": 1}]}, "unknown_parameter", "tools[0].x"),
        ({**HI, "tools": [{"function": {"strict": 1}}]}, "missing_required_parameter", "tools[0].type"),
        (
            {**HI, "tools": [{"type": "function", "function": {"strict": 1}}]},
            "missing_required_parameter",
            "tools[0].function.name",
        ),
        ({"messages": [{"role": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "name": 5}]}, "missing_required_parameter", "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5, "name": 5}]}, "invalid_type", "messages[0].content"),
        ({"messages": [ASK, {**ASK, "tool_calls": 5}]}, "invalid_value", "messages[1].tool_calls"),
        ({**HI, "tool_choice": {"type": "x"}}, "invalid_value", "tool_choice.type"),
        ({**HI, "tool_choice": 5}, "invalid_type", "tool_choice"),
        ({**HI, "response_format": {"type": "text"}, "seed": "x"}, "invalid_type", "seed"),
        ({**HI, "temperature": 10**400}, "decimal_above_max_value", "temperature"),
    ],
)
def test_the_first_fault_is_told(body: dict[str, Any], code: str, param: str) -> None:
    """Unknown names come first. Then it is the fields' order, and within an object: unknown, missing, wrong."""
    assert refusal(ChatRequest, body) == (code, param)


def test_what_a_conversion_refuses_waits_for_the_fields_before_it() -> None:
    grammar = {"structured_outputs": {"json_object": False}}
    assert refusal(ChatRequest, {**HI, **grammar, "n": 0}) == ("invalid_value", "structured_outputs.json_object")
    assert refusal(ChatRequest, {**HI, **grammar, "top_p": 2}) == ("decimal_above_max_value", "top_p")


@pytest.mark.parametrize(
    ("model", "body", "ignored"),
    [
        (ChatRequest, {**HI, "foo": 1, "bar": {"x": 1}}, ["foo", "bar"]),
        (ChatRequest, {"messages": [ASK, {**ASK, "mood": 1}]}, ["messages[1].mood"]),
        (
            ChatRequest,
            {**HI, "tools": [{"type": "function", "x": 1, "function": {"name": "f", "y": 2}}]},
            ["tools[0].x", "tools[0].function.y"],
        ),
        (ResponsesRequest, {"input": [{**ASK, "z": 1}], "text": {"q": 1}}, ["input[0].z", "text.q"]),
        (MessagesRequest, {"max_tokens": 1, "messages": [{**ASK, "z": 1}]}, ["messages[0].z"]),
    ],
)
def test_unknown_names_are_ignored_at_any_depth(
    model: type[RequestModel], body: dict[str, Any], ignored: list[str]
) -> None:
    found: list[str] = []
    read(model, body, found)
    assert sorted(found) == sorted(ignored)
    assert refusal(model, body)[0] == "unknown_parameter"


def test_an_ignored_key_is_not_passed_on() -> None:
    tool = {"type": "function", "x": 1, "function": {"name": "f", "y": 2, "description": None}}
    made = read(ChatRequest, {**HI, "tools": [tool]}, [])
    assert made.tools is not None
    assert tuple(tool.shown for tool in made.tools) == (
        {"type": "function", "function": {"name": "f", "description": None}},
    )


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatRequest, {**HI, **dict.fromkeys(map(str, range(80_000)), 1)}),
        (ChatRequest, {**HI, "stream_options": dict.fromkeys(map(str, range(80_000)), 1)}),
        (ChatRequest, {"messages": [1] * 65_536}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 65_536}]}),
        (ChatRequest, {**HI, "tools": [{}] * 128}),
        (CompletionRequest, {"prompt": "x", "allowed_token_ids": ["x"] * 65_536}),
        (CompletionRequest, {"prompt": ["x"] + [1] * 2_000}),
        (ResponsesRequest, {"input": [1] * 65_536}),
        (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [{}] * 65_536}]}),
        (TokenizeRequest, {"messages": [ASK], "documents": [1] * 1_024}),
    ],
)
def test_of_many_faults_few_are_collected(
    model: type[RequestModel], body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pydantic describes every error that it has found, and nobody else runs meanwhile."""
    counts: list[int] = []

    def counted(error: ValidationError, spelt: dict[str, str]) -> RequestError:
        counts.append(error.error_count())
        return original(error, spelt)

    original = validation.request_error
    monkeypatch.setattr(validation, "request_error", counted)
    refusal(model, body)
    assert max(counts, default=0) <= 2


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, TokenizeRequest])
def test_a_schema_stands_alone(model: type[RequestModel]) -> None:
    """Tests and tools read one field of it, without any definitions."""
    assert "$ref" not in str(schema_of(model))
