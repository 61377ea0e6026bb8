"""The embedded model calls tools for an application that uses the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Daemon

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
STRICT_ADD: Any = {**ADD, "function": {**ADD["function"], "strict": True}}


def asked(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "tiny", "messages": messages, "tools": [WEATHER, ADD], "temperature": 0, "seed": 1, **fields}


def called(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_the_formats_are_stated_at_start(daemon: Daemon) -> None:
    assert "tool calls: the checkpoint's own format; reasoning: none" in daemon.output
    model = daemon.get("/state").json()["model"]
    assert (model["tool_format"], model["reasoning_format"]) == ("own", "none")


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_a_tool_is_called_plain_streamed_and_by_the_helper(daemon: Daemon, tool_choice: Any) -> None:
    client, fields = daemon.client(), asked("What is the weather in Paris?", tool_choice=tool_choice)
    plain = client.chat.completions.create(**fields).choices[0]
    assert (plain.finish_reason, plain.message.content) == ("tool_calls", None)
    assert called(plain.message) == [("get_weather", {"city": "Paris"})]
    pieces = ["", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            pieces[0] += call.function.name or ""
            pieces[1] += call.function.arguments
    assert plain.message.tool_calls is not None
    assert pieces == ["get_weather", plain.message.tool_calls[0].function.arguments]
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert (message.content, called(message)) == (None, called(plain.message))


def test_the_result_of_a_call_becomes_an_answer(daemon: Daemon) -> None:
    client, fields = daemon.client(), asked("What is 12 + 30?")
    message = client.chat.completions.create(**fields).choices[0].message
    assert called(message) == [("add", {"a": 12, "b": 30})]
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    fields["messages"] += [message.model_dump(), result]
    answer = client.chat.completions.create(**fields).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content is not None
    assert "42" in answer.message.content


def test_a_call_is_made_where_the_model_would_not(daemon: Daemon) -> None:
    """With `required` and with a named tool. On its own, the model answers a greeting with a greeting."""
    client, num_whole = daemon.client(), 0
    assert client.chat.completions.create(**asked("Hello!")).choices[0].message.tool_calls is None
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        for seed in range(3):
            fields = asked("Hello!", tool_choice=choice, temperature=1.0, seed=seed, max_tokens=300)
            answer = client.chat.completions.create(**fields).choices[0]
            if answer.finish_reason == "length":
                continue
            num_whole += 1
            assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
            for name, arguments in called(answer.message):
                assert name in (("get_weather", "add") if choice == "required" else ("add",))
                assert set(arguments) == ({"a", "b"} if name == "add" else {"city"})
    assert num_whole >= 4


def test_strict_arguments_follow_their_schema_at_any_temperature(daemon: Daemon) -> None:
    client, num_called = daemon.client(), 0
    for seed in range(12):
        fields = asked("What is 7 + 8?", tools=[STRICT_ADD], temperature=1.5, seed=seed, max_tokens=200)
        answer = client.chat.completions.create(**fields).choices[0]
        for _, arguments in called(answer.message) if answer.finish_reason != "length" else ():
            assert {key: type(value) for key, value in arguments.items()} == {"a": int, "b": int}
            num_called += 1
    assert num_called > 3


def test_tools_and_a_schema_in_one_request(daemon: Daemon) -> None:
    client = daemon.client()
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    calls = client.chat.completions.create(**asked("What is the weather in Paris?", response_format=wanted)).choices[0]
    assert called(calls.message) == [("get_weather", {"city": "Paris"})]
    fields = asked("Hello!", response_format=wanted, tool_choice="none")
    plain = client.chat.completions.create(**fields).choices[0]
    assert json.loads(plain.message.content or "") in ({"answer": "yes"}, {"answer": "no"})
