"""The server accepts back what it wrote: answers cut at any token, plain and streamed, in every format of calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.unit.tool_samples import SAMPLES, TOOLS

from . import anthropic_stream
from . import test_responses_tools as kinds
from .conftest import Script, ScriptedRouter, Serve
from .test_responses import events_of as response_events

USER = {"role": "user", "content": "What is the weather in Paris?"}
NUM_CUTS = 1
"""Cuts of each sample, without `--long`."""
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Api:
    """One family of routes: how its answers are sent back."""

    path: str
    first: Body
    limit: str
    """Field with the limit of the answer's tokens."""
    folded: Callable[[bytes], Body]
    """The answer, from the bytes of its stream."""
    again: Callable[[Body, Body], Body]
    """(request, its answer) -> the next request."""
    written: Callable[[Body], list[str]]
    """The texts of an answer that the model must read as it wrote them."""


def chat_folded(content: bytes) -> Body:
    """As OpenAI's SDK adds up deltas."""
    lines = (line.removeprefix("data: ") for line in content.decode().splitlines() if line.startswith("data: "))
    events = [json.loads(line) for line in lines if line != "[DONE]"]
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


def responses_folded(content: bytes) -> Body:
    """The items as they were when each was done, under the id of the response."""
    events = response_events(content)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    return {"id": events[-1]["response"]["id"], "output": items}


def outputs_of(answer: Body) -> list[Body]:
    """The next items of the caller: the outputs of all calls, and a message."""
    outputs = [
        {**kinds.OUTPUTS[item["type"]], "call_id": item["call_id"]} for item in answer["output"] if "call_id" in item
    ]
    return [*outputs, USER]


def responses_again(body: Body, answer: Body) -> Body:
    return {**body, "input": [*body["input"], *answer["output"], *outputs_of(answer)]}


def responses_by_id(body: Body, answer: Body) -> Body:
    return {**body, "previous_response_id": answer["id"], "input": outputs_of(answer)}


def responses_written(answer: Body) -> list[str]:
    texts = []
    for item in answer["output"]:
        match item["type"]:
            case "message":
                texts += [part["text"] for part in item["content"]]
            case "function_call":
                texts.append(item["arguments"])
            case "custom_tool_call":
                texts.append(json.dumps(item["input"], ensure_ascii=False))
            case "shell_call":
                texts += [json.dumps(command, ensure_ascii=False) for command in item["action"]["commands"]]
            case "local_shell_call":
                texts += [json.dumps(word) for word in item["action"]["command"]]
            case "apply_patch_call":
                texts += [json.dumps(text) for text in item["operation"].values()]
            case "tool_search_call":
                texts.append(json.dumps(item["arguments"]))
    return texts


def messages_again(body: Body, answer: Body) -> Body:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "18 C"}
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    said = {"role": "assistant", "content": answer["content"]}
    return {
        **body,
        "messages": [*body["messages"], said, {"role": "user", "content": [*results, {"type": "text", "text": "?"}]}],
    }


def messages_written(answer: Body) -> list[str]:
    return [
        block["text"] if block["type"] == "text" else json.dumps(block["input"])
        for block in answer["content"]
        if block["type"] in ("text", "tool_use")
    ]


_FUNCTIONS: list[Body] = [tool["function"] for tool in TOOLS]
_ANTHROPIC_TOOLS = [{"name": each["name"].replace(".", "_"), "input_schema": each["parameters"]} for each in _FUNCTIONS]
_RESPONSES: Body = {"input": [USER], "tools": [{"type": "function", **each} for each in _FUNCTIONS]}
APIS: Mapping[str, Api] = {
    "chat": Api(
        "/v1/chat/completions", {"messages": [USER], "tools": list(TOOLS)}, "max_tokens",
        chat_folded, chat_again, chat_written,
    ),
    "responses": Api(
        "/v1/responses", _RESPONSES, "max_output_tokens", responses_folded, responses_again, responses_written
    ),
    "responses by id": Api(
        "/v1/responses", _RESPONSES, "max_output_tokens", responses_folded, responses_by_id, responses_written
    ),
    "messages": Api(
        "/v1/messages", {"messages": [USER], "tools": _ANTHROPIC_TOOLS}, "max_tokens",
        anthropic_stream.folded, messages_again, messages_written,
    ),
}  # fmt: skip


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def check(http: httpx.Client, router: ScriptedRouter, api: Api, cut: int) -> list[Body]:
    """Ask for an answer of `cut` tokens, plain and streamed, and send it back. Returns both."""
    body = {**api.first, api.limit: cut}
    plain = http.post(api.path, json=body).json()
    streamed = api.folded(http.post(api.path, json={**body, "stream": True}).content)
    for answer in (plain, streamed):
        further = http.post(api.path, json={**api.again(api.first, answer), api.limit: 2})
        assert further.status_code == 200, (cut, answer, further.text)
        prompt = router.model.tokenizer.decode(router.submits[-1].prompt_ids, skip_special=False)
        for text in api.written(answer):
            # Objects are printed by the template.
            assert is_object(text) or text.strip() in prompt, (cut, text, prompt)
    return [plain, streamed]


@pytest.mark.sampled(keep=36)
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


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_every_cut_of_one_call_is_taken_back(http: httpx.Client, router: ScriptedRouter, api: Api) -> None:
    """Among them are cuts in a name, in a key and in a value."""
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par\u00eds", "hours": [1, 2]}}\n</tool_call>'
    router.will(Script(text=text))
    for cut in range(1, len(router.model.tokenizer.encode(text, False)) + 1):
        check(http, router, api, cut)


@pytest.mark.parametrize("way", ["responses", "responses by id"])
@pytest.mark.parametrize("case", kinds.CALLS)
def test_a_call_of_each_kind_cut_anywhere_is_taken_back(
    wide_http: httpx.Client, wide_router: ScriptedRouter, is_long: bool, case: str, way: str
) -> None:
    """One without its own item is a `function_call` with the text so far."""
    name, arguments, expected = kinds.CALLS[case]
    text = kinds.written(name, arguments)
    wide_router.will(Script(text=text, cuts=(3, 1)))
    api = replace(APIS[way], first={"input": [USER], "tools": kinds.TOOLS})
    num_tokens = len(wide_router.model.tokenizer.encode(text, False))
    cuts = range(1, num_tokens + 1)
    seen = set()
    for cut in cuts if is_long else (*random.Random(case).sample(cuts, 2 * NUM_CUTS), num_tokens):
        seen |= {item["type"] for answer in check(wide_http, wide_router, api, cut) for item in answer["output"]}
    assert expected["type"] in seen
