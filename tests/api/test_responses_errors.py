"""Refusals of /v1/responses. Every field of OpenAI's call is either served or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai.types.responses import response_create_params

from inferd.server.config.settings import Settings
from inferd.server.schema.responses import ResponsesRequest
from tests.api.conftest import app_settings

from .test_responses import WEATHER

BASE: dict[str, Any] = {"input": "Hi"}


def items(*some: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "x"}, *some]}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": None}, "missing_required_parameter", "input"),
        ({"input": []}, "empty_array", "input"),
        ({"input": 5}, "invalid_type", "input"),
        (items({"role": "user", "content": [{"type": "input_text", "text": 1}]}), "invalid_type",
         "input[1].content[0].text"),
        (items({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}), "unsupported_value",
         "input[1].content[0].type"),
        (items({"role": "tool", "content": "x"}), "invalid_value", "input[1].role"),
        (items({"content": "x"}), "missing_required_parameter", "input[1].type"),
        (items({"type": "compaction_trigger"}), "unsupported_value", "input[1].type"),
        (items({"type": "configuration_update"}), "unsupported_value", "input[1].type"),
        (items({"type": "a_call"}), "invalid_value", "input[1].type"),
        (items({"type": "item_reference", "id": "msg_none"}), "invalid_value", "input[1].id"),
        ({"model": "other"}, "model_not_found", "model"),
        ({"max_output_tokens": 0}, "integer_below_min_value", "max_output_tokens"),
        ({"input": "word " * 400}, "context_length_exceeded", "input"),
        ({"truncation": "auto", "input": "word " * 400}, "context_length_exceeded", "input"),
        ({"previous_response_id": "resp_none"}, "previous_response_not_found", "previous_response_id"),
        ({"tools": [{"type": "web_surf"}]}, "invalid_value", "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "shell"}]}]}, "invalid_value",
         "tools[0].tools[0].type"),
        ({"tools": [{"type": "custom", "name": "n", "format": {"type": "grammar", "syntax": "gbnf"}}]},
         "missing_required_parameter", "tools[0].format.definition"),
        ({"tools": [{"type": "function", "name": "n", "colour": 1}]}, "unknown_parameter", "tools[0].colour"),
        ({"tools": [{"type": "custom", "name": "g"}], "tool_choice": {"type": "function", "name": "g"}},
         "invalid_value", "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "shell"}}, "invalid_value", "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}]}},
         "unsupported_value", "tool_choice"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "invalid_value", "tools[0].name"),
        ({"tools": [{**WEATHER, "strict": True, "parameters": {"type": "object", "not": {}}}]}, None,
         "tools[0].parameters"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "invalid_value", "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "unsupported_value", "tool_choice.type"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "tool_search"}}, "invalid_value", "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "function", "name": "f"}}, "invalid_value",
         "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}, None, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "missing_required_parameter",
         "text.format.schema"),
        ({"tools": [{**WEATHER, "parameters": {"maximum": 10**30}}]}, "invalid_value", "tools[0].parameters"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "x"}, "invalid_value", "regex"),
        ({"reasoning": {"effort": "most"}}, "invalid_value", "reasoning.effort"),
        ({"thinking_token_budget": 5}, "unsupported_parameter", "thinking_token_budget"),
        ({"include": ["everything"]}, "invalid_value", "include[0]"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"background": True, "stream": True}, "invalid_value", "background"),
        ({"background": True, "store": False}, "invalid_value", "background"),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
        ({"metadata": {"k" * 65: "x"}}, "string_above_max_length", "metadata." + "k" * 65),
        ({"metadata": {str(i): "x" for i in range(17)}}, "object_above_max_properties", "metadata"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"messages": []}, "unsupported_parameter", "messages"),
        ({"inputs": "x"}, "unknown_parameter", "inputs"),
        ({"chat_template_kwargs": {"messages": 1}}, "unsupported_parameter", "chat_template_kwargs.messages"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_as_the_caller_knows_it(
    http: httpx.Client, router: Any, fields: dict[str, Any], code: str | None, param: str
) -> None:
    response = http.post("/v1/responses", json={**BASE, **fields})
    error = response.json()["error"]
    assert response.status_code in (400, 404)
    assert error["param"].startswith(param)
    assert code is None or (error["code"], error["param"]) == (code, param)
    for name in ("messages", "max_completion_tokens", "max_tokens", "response_format", ".function."):
        assert f"'{name}'" not in error["message"] or name in fields or name == param.rpartition(".")[2]
        assert f"your {name}" not in error["message"]
    assert router.submits == []


def test_every_field_of_openais_call_is_known() -> None:
    names = set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert names <= {*ResponsesRequest.names, *ResponsesRequest.refused, *ResponsesRequest.offered}


def test_unknown_fields_can_be_warned_of(serve: Callable[[Settings], str]) -> None:
    url = serve(app_settings(access_log=False, unknown_fields="warn"))
    response = httpx.post(f"{url}/v1/responses", json={**BASE, "colour": {}})
    assert response.status_code == 200
    assert "colour" in response.headers["x-inferd-warning"]


def test_the_types_that_a_refusal_lists_can_be_sent(http: httpx.Client) -> None:
    def answer(kind: str) -> httpx.Response:
        part = {"type": kind, "refusal" if kind == "refusal" else "text": "x"}
        return http.post("/v1/responses", json={"input": [{"role": "user", "content": [part]}]})

    listed = re.findall(r"'(\w+)'", answer("text").json()["error"]["message"].partition("Supported values are: ")[2])
    assert listed == ["input_text", "output_text", "refusal"]
    assert [answer(kind).status_code for kind in listed] == [200] * 3
