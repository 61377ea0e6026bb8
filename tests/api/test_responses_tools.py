"""Tools of every kind in /v1/responses: the model sees functions, the caller its own items, and notices the rest."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from .conftest import ScriptedRouter
from .test_responses import CUTS, WEATHER, events_of, prompt_of

CUSTOM: Any = {"type": "custom", "name": "write", "description": "Write a text."}
SPACE: Any = {
    "type": "namespace",
    "name": "mcp__words",
    "description": "Words.",
    "tools": [
        {"type": "function", "name": "count", "parameters": {"type": "object", "properties": {}}},
        {"type": "custom", "name": "write"},
    ],
}
SEARCH: Any = {"type": "tool_search", "execution": "client"}
SHELL: Any = {"type": "shell", "environment": {"type": "local"}}
TOOLS: Any = [WEATHER, CUSTOM, SPACE, SEARCH, SHELL, {"type": "local_shell"}, {"type": "apply_patch"}]
COMMANDS = {"commands": ["ls", "echo é"], "timeout_ms": 5, "max_output_length": None}
PATCH = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b\n"}
LOCAL = {"command": ["ls", "-l"], "working_directory": "/", "timeout_ms": None}

CALLS: Any = {
    "function": ("get_weather", {"city": "Paris"}, {"type": "function_call", "name": "get_weather"}),
    "custom": ("write", {"input": 'a "b"\n'}, {"type": "custom_tool_call", "name": "write", "input": 'a "b"\n'}),
    "namespace": ("mcp__words__count", {},
                  {"type": "function_call", "name": "count", "namespace": "mcp__words", "arguments": "{}"}),
    "custom in a namespace": ("mcp__words__write", {"input": "x"},
                              {"type": "custom_tool_call", "name": "write", "namespace": "mcp__words", "input": "x"}),
    "shell": ("shell", COMMANDS, {"type": "shell_call", "action": COMMANDS, "environment": None}),
    "local_shell": ("local_shell", LOCAL,
                    {"type": "local_shell_call", "action": {**LOCAL, "type": "exec", "env": {}, "user": None}}),
    "apply_patch": ("apply_patch", PATCH, {"type": "apply_patch_call", "operation": PATCH}),
    "a deleted file": ("apply_patch", {"type": "delete_file", "path": "a", "diff": ""},
                       {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}}),
    "tool_search": ("tool_search", {"query": "words"},
                    {"type": "tool_search_call", "execution": "client", "arguments": {"query": "words"}}),
}  # fmt: skip
"""(the model's name of the tool, its arguments, keys of the item)"""
OUTPUTS: Any = {
    "function_call": {"type": "function_call_output", "output": "done"},
    "custom_tool_call": {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "done"}]},
    "shell_call": {
        "type": "shell_call_output",
        "max_output_length": 10,
        "output": [{"stdout": "done", "stderr": "", "outcome": {"type": "exit", "exit_code": 3}}],
    },
    "local_shell_call": {"type": "local_shell_call_output", "output": "done"},
    "apply_patch_call": {"type": "apply_patch_call_output", "status": "completed", "output": "done"},
    "tool_search_call": {"type": "tool_search_output", "execution": "client", "tools": []},
}


@pytest.fixture
def router(wide_router: ScriptedRouter) -> ScriptedRouter:
    return wide_router


@pytest.fixture
def http(wide_http: httpx.Client) -> httpx.Client:
    return wide_http


@pytest.fixture
def client(wide: tuple[ScriptedRouter, str], router: ScriptedRouter) -> Iterator[openai.OpenAI]:
    with contextlib.closing(openai.OpenAI(base_url=f"{wide[1]}/v1", api_key="unused", max_retries=0)) as client:
        yield client


def written(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("case", CALLS)
def test_a_call_of_each_kind_comes_back_as_its_item_and_is_taken_back(
    client: openai.OpenAI, http: httpx.Client, router: Any, script: Any, case: str, cuts: Any
) -> None:
    name, arguments, expected = CALLS[case]
    router.will(script(text=written(name, arguments), cuts=cuts))
    answer = http.post("/v1/responses", json={"input": "?", "tools": TOOLS}).json()
    (item,) = answer["output"]
    assert expected.items() <= item.items()
    assert (answer["status"], item["status"]) == ("completed", "completed") and item["call_id"].startswith("call_")
    parsed = client.responses.create(model="tiny", input="?", tools=TOOLS)
    assert parsed.output[0].type == expected["type"] and set(parsed.output[0].model_extra or {}) <= {"status"}
    streamed = http.post("/v1/responses", json={"input": "?", "tools": TOOLS, "stream": True})
    events = events_of(streamed.content)
    done = next(event["item"] for event in events if event["type"] == "response.output_item.done")
    assert unnamed(done) == unnamed(item)
    check_growth(events, item)
    # Sent back, and continued by its id, it is the same prompt.
    output = {**OUTPUTS[item["type"]], "call_id": item["call_id"]}
    client.responses.create(model="tiny", input=[{"role": "user", "content": "?"}, item, output], tools=TOOLS)
    as_sent = prompt_of(router)
    router.will(script(text="Done."))
    client.responses.create(model="tiny", input=[output], previous_response_id=answer["id"], tools=TOOLS)
    assert prompt_of(router) == as_sent
    assert f'"name": "{name}"' in as_sent
    assert ("done" in as_sent) == (item["type"] != "tool_search_call") and ("exit code 3" in as_sent) == (
        case == "shell"
    )


def unnamed(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def check_growth(events: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """The events of the item's growth add up to it."""
    kinds = [event["type"] for event in events]
    texts = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}
    if item["type"] in texts:
        kind, key = texts[item["type"]], "arguments" if item["type"] == "function_call" else "input"
        grown = "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")
        done = next(event for event in events if event["type"] == f"response.{kind}.done")
        assert grown == done[key] == item[key]
    if item["type"] == "shell_call":
        deltas = [event["delta"] for event in events if event["type"] == "response.shell_call_command.delta"]
        assert deltas == item["action"]["commands"]
    assert kinds.index("response.output_item.added") < kinds.index("response.output_item.done")


def test_a_call_that_cannot_be_read_is_a_function_call(http: httpx.Client, router: Any, script: Any) -> None:
    """Nobody runs a part of a command, and nothing of the answer is lost."""
    text = written("shell", COMMANDS)
    router.will(script(text=text))
    num_tokens = len(router.model.tokenizer.encode(text.partition("echo")[0], False))
    body = {"input": "?", "tools": [SHELL], "max_output_tokens": num_tokens}
    answer = http.post("/v1/responses", json=body).json()
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "shell", "incomplete")
    assert item["arguments"].startswith('{"commands": ["ls"')
    events = events_of(http.post("/v1/responses", json={**body, "stream": True}).content)
    assert "response.function_call_arguments.done" in [event["type"] for event in events]


def test_names_are_joined_and_never_mean_two_tools(client: openai.OpenAI, router: Any) -> None:
    tools: Any = [{**WEATHER, "name": "a__b"}, {"type": "namespace", "name": "a", "description": "x",
                                                "tools": [{**WEATHER, "name": "b"}]}]  # fmt: skip
    client.responses.create(model="tiny", input="?", tools=tools)
    prompt = prompt_of(router)
    assert "- a__b(" in prompt and "- a__b_2(" in prompt


def test_a_deferred_tool_is_seen_when_a_search_has_found_it(client: openai.OpenAI, router: Any) -> None:
    deferred = {**WEATHER, "name": "hidden", "defer_loading": True}
    found: Any = {"type": "namespace", "name": "space", "tools": [deferred]}
    client.responses.create(model="tiny", input="?", tools=[SEARCH, deferred])
    assert "hidden" not in prompt_of(router) and "tool_search" in prompt_of(router)
    call: Any = {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "x"}}
    for tool, name in ((deferred, "hidden"), (found, "space__hidden")):
        output = {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [tool]}
        items: Any = [{"role": "user", "content": "?"}, call, output]
        client.responses.create(model="tiny", input=items, tools=[SEARCH, deferred])
        assert f"- {name}(" in prompt_of(router)
    # OpenAI's own search is not made here: the model sees all tools.
    for search in ({"type": "tool_search"}, {"type": "tool_search", "execution": "server"}):
        raw = client.responses.with_raw_response.create(model="tiny", input="?", tools=[search, deferred])
        assert "- hidden(" in prompt_of(router) and "tool_search" in raw.headers["x-inferd-warning"]


def test_whatever_a_search_has_found_is_named(http: httpx.Client, router: Any) -> None:
    """The keys of a hosted tool are not read, whatever they hold."""
    hosted = [{"type": "mcp", "tools": given} for given in (["a"], [{"x": 1}], 3)]
    call = {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}}
    output = {"type": "tool_search_output", "call_id": "c", "tools": [*hosted, SPACE, WEATHER]}
    answer = http.post("/v1/responses", json={"input": [{"role": "user", "content": "?"}, call, output]})
    assert answer.status_code == 200, answer.text
    found = "Found: mcp, mcp, mcp, mcp__words.count, mcp__words.write, get_weather."
    assert found in prompt_of(router)


def test_additional_tools_are_tools(client: openai.OpenAI, router: Any) -> None:
    more: Any = {"type": "additional_tools", "role": "developer", "tools": [SPACE]}
    first = client.responses.create(model="tiny", input=[more, {"role": "user", "content": "?"}])
    assert "- mcp__words__count(" in prompt_of(router)
    client.responses.create(model="tiny", input="?", previous_response_id=first.id)
    assert "- mcp__words__count(" in prompt_of(router)


HOSTED = ("web_search", "web_search_2025_08_26", "web_search_preview_2025_03_11", "file_search", "computer", "mcp",
          "computer_use_preview", "code_interpreter", "image_generation", "programmatic_tool_calling")  # fmt: skip


@pytest.mark.parametrize("kind", HOSTED)
def test_hosted_tools_are_taken_not_shown_and_told(http: httpx.Client, router: Any, kind: str) -> None:
    body: Any = {"input": "?", "tools": [WEATHER]}
    http.post("/v1/responses", json=body)
    without = prompt_of(router)
    # A search that reads no live pages is a search, too.
    body["tools"] = [{"type": kind, "server_label": "x", "anything": [1], "external_web_access": False}, WEATHER]
    for is_stream in (False, True):
        answer = http.post("/v1/responses", json={**body, "stream": is_stream})
        assert answer.status_code == 200 and f"'{kind}'" in answer.headers["x-inferd-warning"]
        assert prompt_of(router) == without
    for choice in ({"type": kind}, {"type": "allowed_tools", "mode": "required", "tools": [{"type": kind}]}):
        refused = http.post("/v1/responses", json={**body, "tool_choice": choice})
        assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("tool_choice")
    may = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": kind}, {"type": "function", "name": "get_weather"}],
    }
    assert http.post("/v1/responses", json={**body, "tool_choice": may}).status_code == 200


def told(http: httpx.Client, tools: Any) -> str:
    """The notice of a request with these tools."""
    answer = http.post("/v1/responses", json={"input": "?", "tools": tools})
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-inferd-warning", "")


@pytest.mark.parametrize("tool", [WEATHER, CUSTOM, SHELL, {"type": "apply_patch"}])
def test_a_tool_that_only_programs_may_call_is_not_shown(http: httpx.Client, router: Any, tool: Any) -> None:
    name = tool.get("name", tool["type"])
    for given in ([tool], [{"type": "namespace", "name": "n", "tools": [tool]}] if "name" in tool else [tool]):
        (holder,) = given
        for callers, is_shown in ((["programmatic"], False), (["programmatic", "direct"], True), (None, True)):
            marked = {**tool, "allowed_callers": callers}
            assert (
                f"'{name}'" in told(http, [{**holder, "tools": [marked]} if "tools" in holder else marked])
            ) != is_shown
            assert (f"{name}(" in prompt_of(router)) == is_shown


@pytest.mark.parametrize("kind", ["container_auto", "container_reference"])
def test_a_shell_in_a_container_is_not_shown_and_told(http: httpx.Client, router: Any, kind: str) -> None:
    environment = {"type": kind, "container_id": "x", "file_ids": []}
    assert f"'{kind}'" in told(http, [{"type": "shell", "environment": environment}, WEATHER])
    assert "- shell(" not in prompt_of(router) and "- get_weather(" in prompt_of(router)
    assert told(http, [{"type": "shell", "environment": {"type": "local"}}]) == ""
    assert "- shell(" in prompt_of(router)


def test_the_skills_of_a_shell_are_read_with_it(http: httpx.Client, router: Any) -> None:
    skills = [{"name": "csv", "description": "Reads tables.", "path": "/skills/csv"}]
    assert told(http, [{"type": "shell", "environment": {"type": "local", "skills": skills}}]) == ""
    assert "csv (/skills/csv): Reads tables." in prompt_of(router)


def test_texts_and_arguments_are_held_to_their_grammars(http: httpx.Client, router: Any) -> None:
    for syntax, definition in (("regex", "[xyz]{7}"), ("lark", 'start: "xyzxyzx"')):
        told(http, [{**CUSTOM, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}])
        assert "xyz" in router.submits[-1].params.grammar
    told(http, [{**WEATHER, "strict": True}])
    assert "city" in router.submits[-1].params.grammar
    told(http, [WEATHER])
    assert "city" not in router.submits[-1].params.grammar


CHOICES: Any = [
    ({"type": "function", "name": "get_weather"}, "get_weather"),
    ({"type": "custom", "name": "write"}, "write"),
    ({"type": "function", "name": "count", "namespace": "mcp__words"}, "mcp__words__count"),
    ({"type": "function", "name": "count"}, "mcp__words__count"),
    ({"type": "shell"}, "shell"),
    ({"type": "local_shell"}, "local_shell"),
    ({"type": "apply_patch"}, "apply_patch"),
    ({"type": "tool_search"}, "tool_search"),
]


@pytest.mark.parametrize(("choice", "name"), CHOICES)
def test_a_choice_names_a_tool_of_each_kind(http: httpx.Client, router: Any, choice: Any, name: str) -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    for given in (choice, allowed):
        answer = http.post("/v1/responses", json={"input": "?", "tools": TOOLS, "tool_choice": given})
        assert answer.status_code == 200 and answer.json()["tool_choice"] == given
        grammar = router.submits[-1].params.grammar
        others = {"get_weather", "write", "mcp__words__count", "local_shell", "apply_patch", "tool_search"} - {name}
        assert name in grammar and not any(f'{other}\\"' in grammar for other in others)


def test_what_the_model_cannot_read_in_an_output_or_an_older_message_is_text(http: httpx.Client, router: Any) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [image, {"type": "input_text", "text": "end"}]}
    seen = {"role": "user", "content": [image, {"type": "input_text", "text": "What is it?"}]}
    said = {"role": "assistant", "content": "I do not know."}
    user = {"role": "user", "content": "?"}
    for items in ([user, call, output], [seen, said, user], [user, call, {**output, "output": "see"}, seen]):
        answer = http.post("/v1/responses", json={"input": items})
        assert answer.status_code == 200, answer.text
        assert "is left out (1 image)" in answer.headers["x-inferd-warning"]
        assert prompt_of(router).count("[image omitted: this model reads text alone]") == 1
        assert "AAAA" not in prompt_of(router)
    refused = http.post("/v1/responses", json={"input": [said, seen]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[1].content[0].type")


UNREAD = ("file_search_call", "computer_call", "computer_call_output", "web_search_call", "image_generation_call",
          "code_interpreter_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call",
          "program", "program_output", "compaction")  # fmt: skip


@pytest.mark.parametrize("kind", UNREAD)
def test_items_of_hosted_tools_are_left_out_and_told(http: httpx.Client, router: Any, kind: str) -> None:
    user = {"role": "user", "content": "?"}
    http.post("/v1/responses", json={"input": [user, user]})
    without = prompt_of(router)
    image = {"type": "input_image"}
    item = {"type": kind, "id": "x", "result": "y", "content": [None, "a", image], "output": ["a", 3, image]}
    answer = http.post("/v1/responses", json={"input": [user, item, user]})
    assert answer.status_code == 200, answer.text
    assert f"'{kind}'" in answer.headers["x-inferd-warning"] and "left out" not in answer.headers["x-inferd-warning"]
    assert prompt_of(router) == without
    listed = http.get(f"/v1/responses/{answer.json()['id']}/input_items").json()["data"]
    assert [item["type"] for item in listed] == ["message", kind, "message"], "nothing is lost"


@pytest.mark.parametrize("arguments", ['{"city', "[1]", "1e400", "", "null", '"x"', '{"a": 1, "a": 2}', "{" * 200])
def test_arguments_are_any_string(http: httpx.Client, arguments: str) -> None:
    items = [
        {"role": "user", "content": "?"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    assert http.post("/v1/responses", json={"input": items}).status_code == 200


def test_sealed_reasoning_of_another_server_is_left_out_and_told(http: httpx.Client, router: Any) -> None:
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    answer = http.post("/v1/responses", json={"input": [reasoning, {"role": "user", "content": "?"}]})
    assert answer.status_code == 200 and "encrypted_content" in answer.headers["x-inferd-warning"]


def test_a_summary_alone_is_left_out_and_told(http: httpx.Client, router: Any) -> None:
    user, said = {"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}
    summary = [{"type": "summary_text", "text": "It thought."}]
    thought = [{"type": "reasoning_text", "text": "All of it."}]
    for fields, words in (
        ({"summary": summary}, "'summary'"),
        ({"summary": summary, "content": [], "encrypted_content": None}, "'summary'"),
        ({"summary": summary, "encrypted_content": "gAAAA"}, "'encrypted_content'"),
        ({"summary": summary, "content": thought}, ""),
        ({"summary": []}, ""),
    ):
        answer = http.post("/v1/responses", json={"input": [user, {"type": "reasoning", **fields}, said, user]})
        told = answer.headers.get("x-inferd-warning", "")
        assert bool(told) == bool(words) and words in told, (fields, told)
        assert "It thought." not in prompt_of(router)


@pytest.mark.parametrize(
    "field",
    [
        {"context_management": [{"type": "compaction"}]},
        {"access_programs": {"a": 1}},
        {"moderation": {"model": "x"}},
        {"truncation": "auto"},
    ],
)
def test_offers_among_the_fields_are_told(http: httpx.Client, router: Any, field: dict[str, Any]) -> None:
    http.post("/v1/responses", json={"input": "?"})
    without = prompt_of(router)
    answer = http.post("/v1/responses", json={"input": "?", **field})
    assert answer.status_code == 200 and next(iter(field)) in answer.headers["x-inferd-warning"]
    assert prompt_of(router) == without


HUGE = 10**300
ALLOWED = {"type": "allowed_tools", "mode": "auto"}


def test_no_number_is_too_large_to_be_repeated(http: httpx.Client, router: Any, script: Any) -> None:
    """A response repeats tools and items. JSON that it could not write is refused, or written otherwise."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": f'{{"a": {HUGE}}}'}
    shell = {"type": "shell_call", "call_id": "c", "action": {"commands": [], "timeout_ms": HUGE}}
    local = {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"command": [], "env": {"a": HUGE}}}
    search = {"type": "tool_search_call", "call_id": "c", "arguments": {"a": HUGE}}
    for fields, status in (
        ({"max_output_tokens": HUGE}, 200),
        ({"max_tool_calls": HUGE}, 200),
        ({"tools": [{**WEATHER, "output_schema": {"maximum": HUGE}}]}, 400),
        ({"tools": [{"type": "web_search", "a": HUGE}]}, 400),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{**WEATHER, "allowed_callers": [HUGE]}]}]}, 400),
        ({"input": [call]}, 200),
        *(({"input": [item]}, 400) for item in (shell, local, search, {"type": "mcp_call", "a": HUGE})),
        ({"tools": [WEATHER], "tool_choice": {**ALLOWED, "tools": [{"type": "mcp", "a": HUGE}]}}, 400),
    ):
        answer = http.post("/v1/responses", json={"input": "?", **fields})
        assert answer.status_code == status, (fields, answer.text)
    for name, arguments in (("shell", {"commands": ["ls"], "timeout_ms": HUGE}), ("tool_search", {"query": HUGE})):
        router.will(script(text=written(name, arguments)))
        (item,) = http.post("/v1/responses", json={"input": "?", "tools": TOOLS}).json()["output"]
        assert (item["type"], str(HUGE) in item["arguments"]) == ("function_call", True)
