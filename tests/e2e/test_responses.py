"""/v1/responses through the official client against the real engine."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from .conftest import Daemon
from .test_client import wait_idle

SAMPLED: Any = {
    "model": "tiny", "input": "Tell me a short story.", "temperature": 1.0, "max_output_tokens": 40,
    "extra_body": {"seed": 3},
}  # fmt: skip
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
QUESTION = "What is the weather in Paris?"


class Person(BaseModel):
    name: str
    age: int


def ended(client: openai.OpenAI, response_id: str) -> Any:
    """Waits for the response's end. The time limit only keeps a broken test from hanging."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        answer = client.responses.retrieve(response_id)
        if answer.status not in ("queued", "in_progress"):
            return answer
    raise AssertionError("it never ended")


def test_plain_streamed_and_background_answers_are_the_chat_answer(daemon: Daemon) -> None:
    client = daemon.client()
    plain = client.responses.create(**SAMPLED)
    with client.responses.stream(**SAMPLED) as stream:
        streamed = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    later = ended(client, client.responses.create(**SAMPLED, background=True).id)
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": SAMPLED["input"]}],
        temperature=1.0,
        max_tokens=40,
        extra_body={"seed": 3},
    )
    assert chat.choices[0].message.content
    assert {plain.output_text, streamed, later.output_text} == {chat.choices[0].message.content}
    assert chat.usage is not None
    for answer in (plain, later):
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
            chat.usage.prompt_tokens, chat.usage.completion_tokens)  # fmt: skip
        assert answer.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")


def test_a_follow_up_finds_its_history_cached(daemon: Daemon) -> None:
    client = daemon.client()
    told = "My name is Ada, and this is told at some length, so that blocks of it are cached. " * 4
    first = client.responses.create(model="tiny", input=told, temperature=0, max_output_tokens=20)
    second = client.responses.create(
        model="tiny", input="What is my name?", previous_response_id=first.id, temperature=0, max_output_tokens=20
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens // 2
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"] * 3
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_parse_gives_an_instance(daemon: Daemon) -> None:
    answer = daemon.client().responses.parse(
        model="tiny", input="Invent a person.", text_format=Person, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Person)


def test_a_tool_is_called_and_its_output_read(daemon: Daemon) -> None:
    client = daemon.client()
    for choice in ("auto", "required"):
        asked: Any = {"model": "tiny", "tools": [WEATHER], "temperature": 0}
        first = client.responses.create(input=QUESTION, tool_choice=choice, **asked)
        [call] = [item for item in first.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21}'}]
        second = client.responses.create(input=output, previous_response_id=first.id, **asked)
        assert "21" in second.output_text


def test_a_cancelled_response_gives_its_blocks_back(daemon: Daemon) -> None:
    client = daemon.client()
    long: Any = {"model": "tiny", "input": "Count.", "background": True, "extra_body": {"ignore_eos": True}}
    for _ in range(2):
        client.responses.delete(client.responses.create(**long).id)
    for _ in range(10):  # on a busy machine an answer may be complete before the next request arrives
        cancelled = client.responses.cancel(client.responses.create(**long).id)
        if cancelled.status == "cancelled":
            break
    wait_idle(daemon)
    assert client.responses.retrieve(cancelled.id).status == "cancelled"
