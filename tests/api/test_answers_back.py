"""The server accepts back what it wrote: answers cut at any token, plain and streamed, in every format of calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.unit.tool_samples import SAMPLES, TOOLS

from .conftest import Script, ScriptedRouter, Serve

USER = {"role": "user", "content": "What is the weather in Paris?"}
NUM_CUTS = 3
"""Cuts of each sample, without `--long`."""
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Api:
    """One family of routes: how its answers are sent back."""

    path: str
    first: Body
    limit: str
    """Field with the limit of the answer's tokens."""
    folded: Callable[[list[Body]], Body]
    """The answer, from the events of its stream."""
    again: Callable[[Body, Body], Body]
    """(request, its answer) -> the next request."""
    written: Callable[[Body], list[str]]
    """The texts of an answer that the model must read as it wrote them."""


def chat_folded(events: list[Body]) -> Body:
    """As OpenAI's SDK adds up deltas."""
    message: Body = {"role": "assistant", "content": None}
    calls: dict[int, Body] = {}
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls") or ():
            begun = calls.setdefault(call["index"], {**call, "function": {**call["function"], "arguments": ""}})
            begun["function"]["arguments"] += call["function"].get("arguments") or ""
    return {"choices": [{"message": message | ({"tool_calls": list(calls.values())} if calls else {})}]}


def chat_again(body: Body, answer: Body) -> Body:
    message = answer["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "18 C"} for call in message.get("tool_calls") or ()
    ]
    return {**body, "messages": [*body["messages"], message, *results, USER]}


def chat_written(answer: Body) -> list[str]:
    message = answer["choices"][0]["message"]
    return [message["content"] or "", *(call["function"]["arguments"] for call in message.get("tool_calls") or ())]


APIS: Mapping[str, Api] = {
    "chat": Api(
        "/v1/chat/completions", {"messages": [USER], "tools": list(TOOLS)}, "max_tokens",
        chat_folded, chat_again, chat_written,
    ),
}  # fmt: skip


def events_of(text: str) -> list[Body]:
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def check(http: httpx.Client, router: ScriptedRouter, api: Api, cut: int) -> None:
    """Ask for an answer of `cut` tokens, plain and streamed, and send it back."""
    body = {**api.first, api.limit: cut}
    plain = http.post(api.path, json=body).json()
    streamed = api.folded(events_of(http.post(api.path, json={**body, "stream": True}).text))
    for answer in (plain, streamed):
        further = http.post(api.path, json={**api.again(api.first, answer), api.limit: 2})
        assert further.status_code == 200, (cut, answer, further.text)
        prompt = router.model.tokenizer.decode(router.submits[-1].prompt_ids, skip_special=False)
        for text in api.written(answer):
            # Objects are printed by the template.
            assert is_object(text) or text.strip() in prompt, (cut, text, prompt)


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if not sample.prompt])
def test_an_answer_cut_anywhere_is_taken_back(serving_format: Serve, is_long: bool, api: Api, name: str) -> None:
    sample = SAMPLES[name]
    client, router = serving_format(sample.tools, sample.reasoning)
    router.will(Script(text=sample.text, cuts=(3, 1)))
    cuts = range(1, len(router.model.tokenizer.encode(sample.text, False)) + 2)
    some = cuts if is_long else random.Random(name).sample(cuts, min(NUM_CUTS, len(cuts)))
    with httpx.Client(base_url=str(client.base_url).removesuffix("/v1/"), timeout=20) as http:
        for cut in some:
            check(http, router, api, cut)


def test_every_cut_of_one_call_is_taken_back(http: httpx.Client, router: ScriptedRouter) -> None:
    """Among them are cuts in a name, in a key and in a value."""
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par\u00eds", "hours": [1, 2]}}\n</tool_call>'
    router.will(Script(text=text))
    for cut in range(1, len(router.model.tokenizer.encode(text, False)) + 1):
        check(http, router, APIS["chat"], cut)
