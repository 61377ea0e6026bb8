"""/v1/responses as the official client sees it: plain, streamed event by event, with calls and reasoning, continued."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferd.engine.api.wire.messages import Failure
from inferd.server.config.settings import Settings
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.text.model import ServedModel
from inferd.server.tools.detect import Clues, detect
from tests.api.conftest import app_settings

from .conftest import Script, ScriptedRouter, serving

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CUTS = [(1,), (2, 3), (64,), (5, 1)]
TEXT = "Hello there, this is an answer."


@pytest.fixture
def thinking(model: ServedModel) -> Iterator[tuple[openai.OpenAI, ScriptedRouter]]:
    """A model that reasons between <think> and </think> and calls as Hermes does."""
    served = replace(model, format=detect(Clues(), "hermes", "think"))
    router = ScriptedRouter(served)
    with (
        serving(served, router, app_settings(access_log=False)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=20) as client,
    ):
        yield client, router


def events_of(content: bytes) -> list[dict[str, Any]]:
    """Every event, its name checked against its type and its number against its place."""
    blocks = content.decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for i, block in enumerate(block for block in blocks if not block.startswith(":")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event.pop("sequence_number") == i
        events.append(event)
    return events


def nameless(value: Any) -> Any:
    """`value` with random ids such as "msg_8c0..." shortened to "msg"."""
    return json.loads(re.sub(r'"(msg|rs|fc|call|resp)_[0-9a-f]{16,}"', r'"\1"', json.dumps(value)))


def brief(event: dict[str, Any]) -> Any:
    """Shortens an event that carries the response to the fields that change."""
    if "response" in event:
        kept = {key: event["response"][key] for key in ("status", "output", "usage", "incomplete_details", "error")}
        return event["type"], nameless(kept)
    return nameless(event)


def prompt_of(router: Any, i: int = -1) -> str:
    text: str = router.model.tokenizer.decode(router.submits[i].prompt_ids, skip_special=False)
    return text


def test_a_plain_answer(client: openai.OpenAI, router: Any) -> None:
    answer = client.responses.create(
        model="alias",
        input="Hi",
        instructions="Be brief.",
        metadata={"a": "b"},
        temperature=0.5,
        extra_body={"seed": 7, "top_k": 3},
    )
    assert answer.output_text == TEXT
    assert (answer.status, answer.model, answer.object, answer.error) == ("completed", "alias", "response", None)
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert (answer.tool_choice, answer.tools, answer.parallel_tool_calls) == ("auto", [], True)
    assert answer.id.startswith("resp_")
    [message] = answer.output
    assert message.type == "message"
    assert (message.role, message.status, len(message.content)) == ("assistant", "completed", 1)
    submit = router.submits[0]
    assert prompt_of(router) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (submit.params.seed, submit.params.top_k, submit.params.temperature) == (7, 3, 0.5)
    num_output = len(router.model.tokenizer.encode(TEXT, False)) + 1
    assert answer.usage is not None
    assert answer.usage.model_dump(exclude_unset=True) == {
        "input_tokens": len(submit.prompt_ids),
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(submit.prompt_ids) + num_output,
    }


def test_it_is_the_chat_answer(client: openai.OpenAI, router: Any) -> None:
    """Equal requests give the engine the same prompt and parameters."""
    tool = {"type": "function", "function": {key: value for key, value in WEATHER.items() if key != "type"}}
    common: Any = {"model": "tiny", "temperature": 0.3, "top_p": 0.8, "extra_body": {"seed": 5, "min_p": 0.1}}
    client.chat.completions.create(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "I look.", "tool_calls": [
                {"id": "c1", "type": "function",
                 "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "18 C"},
        ],
        tools=[tool],  # type: ignore[list-item]
        max_completion_tokens=9,
        **common,
    )  # fmt: skip
    client.responses.create(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                {"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Paris"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "18 C"},
        ],
        tools=[WEATHER],
        max_output_tokens=9,
        **common,
    )  # fmt: skip
    chat, response = router.submits
    assert (chat.prompt_ids, chat.params) == (response.prompt_ids, response.params)


GOLDEN: list[Any] = [
    ("response.created", {"status": "in_progress", "output": [], "usage": None}),
    ("response.in_progress", {"status": "in_progress", "output": [], "usage": None}),
    {"type": "response.output_item.added", "output_index": 0, "item": {
        "id": "msg", "type": "message", "status": "in_progress", "role": "assistant", "content": []}},
    {"type": "response.content_part.added", "item_id": "msg", "output_index": 0, "content_index": 0, "part": {
        "type": "output_text", "text": "", "annotations": [], "logprobs": []}},
    {"type": "response.output_text.delta", "item_id": "msg", "output_index": 0, "content_index": 0, "delta": "One",
     "logprobs": []},
    {"type": "response.output_text.delta", "item_id": "msg", "output_index": 0, "content_index": 0, "delta": " two",
     "logprobs": []},
    {"type": "response.output_text.done", "item_id": "msg", "output_index": 0, "content_index": 0, "text": "One two",
     "logprobs": []},
    {"type": "response.content_part.done", "item_id": "msg", "output_index": 0, "content_index": 0, "part": {
        "type": "output_text", "text": "One two", "annotations": [], "logprobs": []}},
    {"type": "response.output_item.done", "output_index": 0, "item": {
        "id": "msg", "type": "message", "status": "completed", "role": "assistant", "content": [
            {"type": "output_text", "text": "One two", "annotations": [], "logprobs": []}]}},
]  # fmt: skip


def test_a_stream_event_by_event(http: httpx.Client, router: Any, script: Any) -> None:
    encode = router.model.tokenizer.encode
    first = len(encode("One", False))
    router.will(script(text="One two", cuts=(first, 64)))
    response = http.post("/v1/responses", json={"input": "Hi", "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response.content)
    golden = [(one[0], one[1] | {"incomplete_details": None, "error": None}) if isinstance(one, tuple) else one
              for one in GOLDEN]  # fmt: skip
    assert [brief(event) for event in events[:-1]] == golden
    last = events[-1]
    assert last["type"] == "response.completed"
    assert last["response"]["output"] == [events[-2]["item"]]
    assert last["response"]["usage"]["output_tokens"] == len(encode("One two", False)) + 1
    assert http.get(f"/v1/responses/{last['response']['id']}").json() == last["response"]


@pytest.mark.parametrize("cuts", CUTS)
def test_calls_event_by_event(http: httpx.Client, router: Any, script: Any, cuts: Any) -> None:
    router.will(script(text=f"I look.\n{CALL}", cuts=cuts))
    events = events_of(http.post("/v1/responses", json={"input": "?", "tools": [WEATHER], "stream": True}).content)
    told = [brief(event) for event in events if event.get("output_index") == 1]
    assert told[0] == {"type": "response.output_item.added", "output_index": 1, "item": {
        "id": "fc", "type": "function_call", "status": "in_progress", "call_id": "call", "name": "get_weather",
        "arguments": ""}}  # fmt: skip
    deltas = told[1:-2]
    assert {event["type"] for event in deltas} == {"response.function_call_arguments.delta"}
    assert "".join(event["delta"] for event in deltas) == '{"city": "Paris"}'
    assert told[-2] == {"type": "response.function_call_arguments.done", "item_id": "fc", "output_index": 1,
                        "name": "get_weather", "arguments": '{"city": "Paris"}'}  # fmt: skip
    assert told[-1]["item"]["status"] == "completed"
    names = [event["type"] for event in events]
    assert names.index("response.output_text.done") < names.index("response.function_call_arguments.delta")
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "function_call"]


def test_reasoning_event_by_event(thinking: tuple[openai.OpenAI, ScriptedRouter]) -> None:
    client, router = thinking
    router.will(Script(text="<think>\nParis, then.\n</think>\n\nSunny."))
    stream = client.responses.create(model="tiny", input="?", stream=True, include=["reasoning.encrypted_content"])
    events = [event.model_dump(exclude_unset=True) for event in stream]
    reasoned = [event for event in events if event.get("output_index") == 0]
    kinds = list(dict.fromkeys(event["type"].removeprefix("response.") for event in reasoned))
    assert kinds == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip
    thought = "".join(event["delta"] for event in reasoned if event["type"] == "response.reasoning_text.delta")
    item = reasoned[-1]["item"]
    assert thought == item["content"][0]["text"] == "Paris, then."
    assert item["summary"] == []
    answer = events[-1]["response"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    for sent in (item, {**item, "content": None}):
        spoken = {"role": "assistant", "content": "Sunny."}
        back: Any = [{"role": "user", "content": "?"}, sent, spoken, {"role": "user", "content": "Sure?"}]
        client.responses.create(model="tiny", input=back)
    assert prompt_of(router, -1) == prompt_of(router, -2), "the opaque form says the same as the plain one"


SAMPLES = (
    TEXT,
    CALL,
    f"I look.\n{CALL}\n{CALL}",
    f"{CALL}\nDone.",
    "<think>Hm.\n</think>\nWell.",
    f"<think>Hm.</think>{CALL}",
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.sampled_from(SAMPLES), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6), limit=st.integers(1, 60)
)
def test_streamed_plain_and_in_the_background_are_one_answer(
    thinking: tuple[openai.OpenAI, ScriptedRouter], text: str, cuts: list[int], limit: int
) -> None:
    client, router = thinking
    router.submits.clear()
    asked: Any = {
        "model": "tiny",
        "input": "?",
        "tools": [WEATHER],
        "max_output_tokens": limit,
        "extra_body": {"seed": 1},
    }
    router.will(Script(text=text, cuts=tuple(cuts)))
    plain = client.responses.create(**asked)
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == f"response.{plain.status}"
    waiting = client.responses.create(**asked, background=True)
    assert (waiting.status, waiting.background) == ("queued", True)
    done = wait_for(client, waiting.id)
    kept = ("status", "output", "usage", "incomplete_details")
    shown = [nameless({key: value for key, value in one.model_dump(mode="json").items() if key in kept})
             for one in (plain, last.response, done)]  # type: ignore[union-attr]  # fmt: skip
    assert shown[0] == shown[1] == shown[2]
    if plain.status == "incomplete":
        assert plain.incomplete_details is not None
        assert plain.incomplete_details.reason == "max_output_tokens"
        assert plain.output[-1].status == "incomplete"  # type: ignore[union-attr]


def wait_for(client: openai.OpenAI, response_id: str) -> Any:
    """Waits for the response's end. The time limit only keeps a broken test from hanging."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        answer = client.responses.retrieve(response_id)
        if answer.status not in ("queued", "in_progress"):
            return answer
    raise AssertionError("it never ended")


def test_the_clients_own_helpers(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text=f"I look.\n{CALL}"))
    with client.responses.stream(model="tiny", input="?", tools=[WEATHER]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_text.delta", "response.function_call_arguments.delta"} <= kinds
    assert final.output_text == "I look."
    assert [item.arguments for item in final.output if item.type == "function_call"] == ['{"city": "Paris"}']


def test_log_probabilities_are_those_of_chat(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="One two three"))
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
    )
    asked: Any = {"model": "tiny", "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    plain: Any = client.responses.create(**asked).output[0]
    assert chat.choices[0].logprobs is not None
    expected = [token.model_dump() for token in chat.choices[0].logprobs.content or ()]
    assert [token.model_dump() for token in plain.content[0].logprobs] == expected
    events = list(client.responses.create(**asked, stream=True))
    done = next(event for event in events if event.type == "response.output_text.done")
    deltas = [token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
    assert [token.token for token in done.logprobs] == [token["token"] for token in expected]
    assert [token.model_dump() for token in deltas] == expected[: len(deltas)]
    assert len(deltas) >= len(expected) - 1, "the token that ends the answer has no text"


def test_a_schema_is_a_grammar(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text='{"a": 1}'))
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    answer = client.responses.create(model="tiny", input="?", text=text)
    wrapped: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "?"}], response_format=wrapped)
    first, second = (re.sub("json_[0-9a-f]{16}", "json", submit.params.grammar) for submit in router.submits)
    assert first == second and "BEGIN" in first
    assert answer.text is not None
    assert answer.text.model_dump(exclude_unset=True, by_alias=True)["format"] == text["format"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", True),
        ({"type": "function", "name": "get_weather"}, True),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}, True),
        ("auto", False),
        ("none", False),
    ],
)
def test_a_choice_is_enforced(client: openai.OpenAI, router: Any, script: Any, choice: Any, names: bool) -> None:
    router.will(script(text=CALL))
    answer = client.responses.create(model="tiny", input="?", tools=[WEATHER], tool_choice=choice)
    assert ("get_weather" in router.submits[0].params.grammar) == names
    assert answer.model_dump(exclude_unset=True)["tool_choice"] == choice
    client.responses.create(model="tiny", input="?", tool_choice="auto", parallel_tool_calls=False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure(http: httpx.Client, router: Any, script: Any, stream: bool) -> None:
    router.will(script(text="One two", failure=Failure("numerical_error", "Not finite.")))
    response = http.post("/v1/responses", json={"input": "Hi", "stream": stream})
    if not stream:
        assert (response.status_code, response.json()["error"]["code"]) == (500, "numerical_error")
        return
    events = events_of(response.content)
    told = {"message": "Not finite.", "type": "server_error", "param": None, "code": "numerical_error"}
    flat = {"code": "numerical_error", "message": "Not finite.", "param": None}
    assert events[-2] == {"type": "error", **flat, "error": told}
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"], failed["error"]["message"]) == (
        "failed", "server_error", "Not finite.")  # fmt: skip
    assert failed["output"][0]["status"] == "incomplete"
    assert http.get(f"/v1/responses/{failed['id']}").status_code == 404


def test_a_stream_begins_before_the_first_token(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(token_ids=(), ends=False))
    with client.responses.create(model="tiny", input="Hi", stream=True) as stream:
        created, in_progress = next(stream), next(stream)
    assert (created.type, in_progress.type) == ("response.created", "response.in_progress")
    assert (created.sequence_number, in_progress.sequence_number) == (0, 1)


def test_a_failure_before_the_first_token_comes_behind_the_first_events(
    http: httpx.Client, router: Any, script: Any
) -> None:
    router.will(script(token_ids=(), failure=Failure("rate_limit_exceeded", "It waited too long.")))
    response = http.post("/v1/responses", json={"input": "Hi", "stream": True})
    events = events_of(response.content)
    assert response.status_code == 200
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "error", "response.failed"]  # fmt: skip
    assert events[3]["response"]["error"]["code"] == "rate_limit_exceeded"


def test_the_client_is_told_of_a_failure_inside_a_stream(client: openai.OpenAI, router: Any, script: Any) -> None:
    router.will(script(text="One two", failure=Failure("numerical_error", "Not finite.")))
    with pytest.raises(openai.APIError, match="Not finite"):
        list(client.responses.create(model="tiny", input="Hi", stream=True))


def test_what_fails_first_has_its_own_status(client: openai.OpenAI, router: Any) -> None:
    router.state = State.STOPPED
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model="tiny", input="Hi", stream=True)
    assert (caught.value.status_code, caught.value.code) == (503, "server_is_overloaded")


def test_a_client_that_leaves_ends_its_answer(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(ends=False))
    with http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as response:
        next(response.iter_raw())
    router.wait_for(lambda: len(router.aborted) == 1)


def test_silence_is_filled(serve: Callable[[Settings], str], router: Any, script: Any) -> None:
    url = serve(app_settings(access_log=False), keep_alive_s=0.02)
    router.will(script(text="One", ends=False))
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=url, timeout=20))
        response = stack.enter_context(client.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}))
        seen = b""
        for data in response.iter_raw():
            seen += data
            if seen.count(b": keep-alive\n\n") >= 2 and b"response.output_text.delta" in seen:
                break
