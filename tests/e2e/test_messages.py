"""Anthropic's API with the real engine: a tool from question to answer, formats, and prefix cache hits."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.api.anthropic_stream import comparable, folded

from .conftest import Daemon

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def ask(daemon: Daemon, **fields: Any) -> dict[str, Any]:
    """Asks plain and streamed, and checks that the answers are equal except for cached tokens."""
    body = {"model": "tiny", "max_tokens": 200, "temperature": 0, "messages": [QUESTION], **fields}
    plain = httpx.post(f"{daemon.url}/v1/messages", json=body, timeout=60)
    assert plain.status_code == 200, plain.text
    streamed = folded(httpx.post(f"{daemon.url}/v1/messages", json={**body, "stream": True}, timeout=60).content)
    message: dict[str, Any] = plain.json()
    assert num_input(streamed) == num_input(message)
    assert comparable({**streamed, "usage": None}) == comparable({**message, "usage": None})
    return message


def num_input(message: dict[str, Any]) -> int:
    usage = message["usage"]
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"])


def test_a_tool_is_used_and_its_result_is_read(daemon: Daemon) -> None:
    for choice in (None, {"type": "any"}, {"type": "tool", "name": "get_weather"}):
        used = ask(daemon, tools=[WEATHER], tool_choice=choice)
        assert used["stop_reason"] == "tool_use"
        [use] = [block for block in used["content"] if block["type"] == "tool_use"]
        assert (use["name"], use["input"]) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": '{"temperature": 21}'}
    turns = [QUESTION, {"role": "assistant", "content": used["content"]}, {"role": "user", "content": [result]}]
    told = ask(daemon, tools=[WEATHER], messages=turns)
    assert "21" in told["content"][0]["text"]
    assert told["stop_reason"] == "end_turn"


def test_it_says_what_chat_says(daemon: Daemon) -> None:
    message = ask(daemon, system="You are kind.")
    turns = [{"role": "system", "content": "You are kind."}, QUESTION]
    chat = daemon.client().chat.completions.create(model="tiny", messages=turns, temperature=0, max_tokens=200)  # type: ignore[arg-type]
    assert message["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
    assert chat.usage is not None
    assert (num_input(message), message["usage"]["output_tokens"]) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )


def test_a_format_is_followed(daemon: Daemon) -> None:
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 999}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    message = ask(daemon, output_config={"format": {"type": "json_schema", "schema": person}})
    made = json.loads(message["content"][0]["text"])
    assert (set(made), type(made["age"])) == ({"name", "age"}, int)


def test_a_prefix_is_found_again_whatever_the_billing_line_says(daemon: Daemon) -> None:
    """This holds also if the request before generated nothing."""
    prompt = "Remember every word of this: " + " ".join(f"word {i}," for i in range(60))
    for i, max_tokens in enumerate((0, 1)):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={i}{i}{i};"}
        system = [billing, {"type": "text", "text": prompt}]
        body = {"model": "tiny", "max_tokens": max_tokens, "system": system, "messages": [QUESTION]}
        usage = httpx.post(f"{daemon.url}/v1/messages", json=body, timeout=60).json()["usage"]
    count = {key: value for key, value in body.items() if key != "max_tokens"}
    counted = httpx.post(f"{daemon.url}/v1/messages/count_tokens", json=count, timeout=60).json()["input_tokens"]
    assert usage["cache_read_input_tokens"] + usage["input_tokens"] == counted
    assert usage["cache_read_input_tokens"] > 0.8 * counted
