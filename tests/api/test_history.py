"""Messages of a chat before the newest one: every form that clients know is taken. What the model cannot read is left
out and told."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.request_model import read
from inferd.server.schema.unread import NOUNS, omitted

from .conftest import ScriptedRouter

USER: Any = {"role": "user", "content": "hi"}
WARNING = "x-inferd-warning"
IMAGE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "high"}}


def prompt_of(http: httpx.Client, router: ScriptedRouter, *messages: Any, warns: str = "", **fields: Any) -> str:
    """The prompt of a taken request, whose answer has the warning."""
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-inferd-warning", "") == warns
    return router.model.tokenizer.decode(router.submits[-1].prompt_ids, skip_special=False)


def say(answer: str, behind: str = "hi") -> str:
    return f"<|im_start|>user\nhi<|im_end|>\n{answer}<|im_end|>\n<|im_start|>user\n{behind}<|im_end|>\n"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": ""}, ""),
        ({"content": []}, ""),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"content": "No.", "refusal": "I will not."}, "No."),
        ({"content": [{"type": "refusal", "refusal": "I will not."}], "refusal": None}, "I will not."),
        ({"content": None, "reasoning": "Hm."}, ""),
        ({"content": "Yes.", "audio": {"id": "audio_1"}}, "Yes."),
        ({"content": "Yes.", "audio": None, "function_call": None, "tool_calls": None}, "Yes."),
    ],
)
def test_an_answer_of_any_form_is_history(http: httpx.Client, router: ScriptedRouter, message: Any, text: str) -> None:
    prompt = prompt_of(http, router, USER, {"role": "assistant", **message}, USER)
    assert say(f"<|im_start|>assistant\n{text}") in prompt


def test_an_answer_that_was_spoken_is_left_out(http: httpx.Client, router: ScriptedRouter) -> None:
    told = "content of older messages and of results is left out (1 audio): the model reads text alone"
    message = {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    assert say(f"<|im_start|>assistant\n{omitted('audio')}") in prompt_of(http, router, USER, message, USER, warns=told)


def test_calls_and_results_of_the_older_form_are_read_as_the_newer(http: httpx.Client, router: ScriptedRouter) -> None:
    def call(name: str, arguments: str) -> Any:
        return {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": arguments}}

    def newer(name: str, arguments: str) -> Any:
        called = {"type": "function", "id": "c", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [called]}

    older = prompt_of(
        http, router, USER, call("f", '{"a": 1}'), {"role": "function", "name": "f", "content": "2"},
        call("g", '{"b'), {"role": "function", "name": "g", "content": None}, USER,
    )  # fmt: skip
    result = {"role": "tool", "tool_call_id": "c"}
    again = prompt_of(
        http, router, USER, newer("f", '{"a": 1}'), {**result, "content": "2"}, newer("g", '{"b'),
        {**result, "content": ""}, USER,
    )  # fmt: skip
    assert older == again
    assert '"arguments": {"a": 1}}' in older and '"arguments": {"b}' in older


def test_a_result_of_the_older_form_has_the_id_of_its_call() -> None:
    """Templates may look for the call of a result."""
    messages = [
        USER,
        {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
        {"role": "function", "name": "f", "content": "2"},
    ]
    _, call, result = read(ChatRequest, {"messages": messages}).messages
    (called,) = call["tool_calls"]  # type: ignore[misc]
    assert len(called["id"]) == 9 and called["id"].isalnum()
    assert result == {"role": "tool", "name": "f", "tool_call_id": called["id"], "content": "2"}


@pytest.mark.parametrize("kind", NOUNS)
def test_content_that_is_not_read_is_left_out_of_history_and_told(
    http: httpx.Client, router: ScriptedRouter, kind: str
) -> None:
    part = {"type": kind, kind: {"url": "https://a.example/" + "x" * 5_000}, "detail": 5}
    text = {"type": "text", "text": "see"}
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
    told = f"content of older messages and of results is left out (3 {NOUNS[kind]}): the model reads text alone"
    prompt = prompt_of(
        http, router, {"role": "user", "content": [text, part]}, call,
        {"role": "tool", "tool_call_id": "c", "content": [part, text]}, {"role": "assistant", "content": [part]}, USER,
        warns=told,
    )  # fmt: skip
    left_out = omitted(NOUNS[kind])
    assert left_out == f"[{NOUNS[kind]} omitted: this model reads text alone]"
    assert f"user\nsee\n{left_out}<|im_end|>" in prompt
    assert f"tool\n{left_out}\nsee<|im_end|>" in prompt
    assert f"assistant\n{left_out}<|im_end|>" in prompt


def test_a_result_behind_the_last_answer_is_history_too(http: httpx.Client, router: ScriptedRouter) -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
    result = {"role": "tool", "tool_call_id": "c", "content": [IMAGE]}
    told = "content of older messages and of results is left out (1 image): the model reads text alone"
    for is_stream in (False, True):
        assert omitted("image") in prompt_of(http, router, USER, call, result, warns=told, stream=is_stream)
    # Some clients put the image of a result into a message of the user behind it.
    result, shown = {**result, "content": "see"}, {"role": "user", "content": [IMAGE]}
    assert f"user\n{omitted('image')}<|im_end|>" in prompt_of(http, router, USER, call, result, shown, warns=told)


def test_names_reach_the_template() -> None:
    messages = [{"role": role, "name": "n", "content": "x"} for role in ("system", "user", "assistant", "tool")]
    assert read(ChatRequest, {"messages": messages}).messages == tuple(messages)


def test_a_result_without_its_call_is_read_and_told_in_every_api(http: httpx.Client, router: Any) -> None:
    """Agents cut the begin of long histories off."""
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c2", "content": "18 C"}
    chats: list[dict[str, Any]] = [
        result,
        {"role": "assistant", "tool_calls": [call]},
        {**result, "tool_call_id": "c1"},
    ]
    items = [
        {"type": "function_call_output", "call_id": "c2", "output": "18 C"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "18 C"},
    ]
    used = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    turns = [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c2", "content": "18 C"}]},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "18 C"}]},
    ]
    asked: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": chats}, "responses": {"input": items},
        "messages": {"messages": turns, "max_tokens": 5},
    }  # fmt: skip
    for path, body in asked.items():
        answer = http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        field = "input" if path == "responses" else "messages"
        told = f"The model reads a tool's result without its call, for 'c2': send the call too, in '{field}'"
        assert answer.headers[WARNING] == told
        for name in body.keys() & {"messages", "input"}:
            whole = http.post(f"/v1/{path}", json={**body, name: body[name][1:]})
            assert WARNING not in whole.headers, path
    first, *others = [submit.prompt_ids for submit in router.submits[::2]]
    assert all(ids == first for ids in others)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"add_vision_id": 1}, "for 'add_vision_id': this"),
        (dict.fromkeys(("x1", "x2", "x3", "x4"), 1), "for 'x1', 'x2', 'x3' and 1 more: this"),
        ({}, ""),
        ({"role": 1}, ""),
        ({"messages_": None}, "for 'messages_': this"),
    ],
)
def test_variables_that_the_template_does_not_read_are_told(http: httpx.Client, given: Any, told: str) -> None:
    for path, body in (("chat/completions", {"messages": [USER]}), ("responses", {"input": "x"})):
        answer = http.post(f"/v1/{path}", json={**body, "chat_template_kwargs": given})
        assert answer.status_code == 200
        warning = answer.headers.get(WARNING, "")
        assert bool(warning) == bool(told)
        assert warning.startswith(f"'chat_template_kwargs' has no effect {told}" if told else "")
