"""Each type and each key that OpenAI's SDK can send to /v1/responses has a kind, and is treated as it says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, get_args

import httpx
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as Params
from openai.types.responses.response_includable import ResponseIncludable

from inferd.server.schema.chat import TEXT_FORMATS
from inferd.server.schema.request_model import Row
from inferd.server.schema.response_items import ITEMS, WITHIN
from inferd.server.schema.response_options import CHOICES, FORMATS, INCLUDES
from inferd.server.schema.response_parts import PARTS
from inferd.server.schema.response_tools import ENVIRONMENTS, TOOLS, hosted_type
from inferd.server.schema.responses import ResponsesRequest
from inferd.server.schema.unread import NOUNS

from .conftest import ScriptedRouter
from .sdk_types import (
    Body,
    Sent,
    Walk,
    check_demand,
    check_hint,
    check_offer,
    check_proofs,
    each,
    fields_of,
    members,
    of_kind,
    types_of,
    words,
)
from .test_responses import nameless

USER: Body = {"role": "user", "content": "hi"}
BASE: Body = {"model": "tiny", "max_output_tokens": 4, "seed": 1}
CALL: Body = {"type": "function_call", "call_id": "x", "name": "x", "arguments": "{}"}
VALUES: Mapping[str, Any] = {
    "responses.access_programs": {"cyber": "daybreak_blue"},
    "responses.background_options": {"completion_window": "8h", "continuation_id": "x"},
    "responses.model": "tiny",
    "responses.image": {"context_compression": "enabled"},
    "responses.include": [],
    "responses.prompt_cache_options": {"mode": "explicit", "prewarm": True},
    "responses.stream_options": {"include_obfuscation": True},
}
"""Values of keys whose first value says nothing."""
TIMES = ("created_at", "completed_at")
"""Keys of an answer that differ between two, besides those that repeat the request."""

_CALLS = "test_a_call_of_each_kind_comes_back_as_its_item_and_is_taken_back"
_CHAT, _CHOICE = "test_it_is_the_chat_answer", "test_a_choice_names_a_tool_of_each_kind"
_LISTED = "test_input_items_are_listed_in_pages"
_NAMES, _FOUND = (
    "test_names_are_joined_and_never_mean_two_tools",
    "test_a_deferred_tool_is_seen_when_a_search_has_found_it",
)
_SCHEMA = "test_a_schema_is_a_grammar"
PROOFS: Mapping[str, str] = {
    "*.allowed_callers": "test_a_tool_that_only_programs_may_call_is_not_shown",
    "*.environment": "test_a_shell_in_a_container_is_not_shown_and_told",
    "*.LocalEnvironmentParam.*": "test_the_skills_of_a_shell_are_read_with_it",
    "*.defer_loading": _FOUND,
    "*.ResponseTextConfigParam.*": _SCHEMA,
    "*.strict": "test_texts_and_arguments_are_held_to_their_grammars",
    "*.CustomToolParam.format": "test_texts_and_arguments_are_held_to_their_grammars",
    "*.CustomToolParam.Text.*": _CALLS,
    "*.Grammar.*": "test_texts_and_arguments_are_held_to_their_grammars",
    "*.ToolSearchToolParam.*": _FOUND,
    "*.NamespaceToolParam.*": _NAMES,
    "*.ToolSearchOutputNamespaceToolParam.*": _FOUND,
    "responses.ResponseToolSearchOutputItemParamParam.*": _FOUND,
    "responses.AdditionalTools.*": "test_additional_tools_are_tools",
    "responses.tools": _CALLS,
    "responses.FunctionToolParam.*": _CALLS,
    "responses.CustomToolParam.*": _CALLS,
    "responses.*Shell*.id": _CALLS,
    "responses.LocalShell*": _CALLS,
    "responses.*Shell*Param.*": _CALLS,
    "responses.ApplyPatch*": _CALLS,
    "responses.ToolSearchCall.*": _CALLS,
    "responses.ResponseCustomToolCall*": _CALLS,
    "responses.ShellCall.*": _CALLS,
    "responses.ShellCallOutput.*": _CALLS,
    "responses.FunctionCallOutput.call_id": "test_an_output_without_an_id_is_of_the_last_call",
    "responses.ResponseFunctionToolCallParam.namespace": _CALLS,
    "responses.ResponseOutputMessageParam.ResponseOutputRefusalParam.*": "test_turns",
    "responses.*Message*.id": _LISTED,
    "responses.*FunctionToolCallParam.*": _CHAT,
    "responses.FunctionCallOutput.*": _CHAT,
    "responses.*Message*": _CHAT,
    "responses.*.encrypted_content": "test_sealed_reasoning_of_another_server_is_left_out_and_told",
    "responses.ResponseReasoningItemParam.*": "test_turns",
    "responses.ItemReference.*": "test_a_call_is_answered_by_its_output_alone",
    "responses.input": _CHAT,
    "responses.background": "test_streamed_plain_and_in_the_background_are_one_answer",
    "responses.stream": "test_streamed_plain_and_in_the_background_are_one_answer",
    "responses.max_output_tokens": "test_streamed_plain_and_in_the_background_are_one_answer",
    "responses.include*logprobs": "test_log_probabilities_are_those_of_chat",
    "responses.include*": "test_reasoning_event_by_event",
    "responses.top_logprobs": "test_log_probabilities_are_those_of_chat",
    "responses.instructions": "test_a_plain_answer",
    "responses.metadata": "test_a_plain_answer",
    "responses.model": "test_a_plain_answer",
    "responses.temperature": _CHAT,
    "responses.top_p": _CHAT,
    "responses.parallel_tool_calls": "test_a_choice_is_enforced",
    "responses.previous_response_id": "test_a_conversation_goes_on",
    "responses.reasoning": "test_the_effort_of_reasoning_is_that_of_chat",
    "responses.Reasoning.effort": "test_the_effort_of_reasoning_is_that_of_chat",
    "responses.store": "test_what_is_not_to_be_stored_is_not",
    "responses.text": _SCHEMA,
    "responses.tool_choice": "test_a_choice_is_enforced",
    "responses.ToolChoiceAllowedParam.*": "test_a_choice_is_enforced",
    "responses.ToolChoice*": _CHOICE,
}
"""Pattern of paths -> the test that shows that such a key is done. The first pattern that fits counts."""

MESSAGE_PARTS, OUTPUT_PARTS = PARTS.values()
PLACES: Mapping[str, Mapping[str, Row]] = {
    "responses.input": ITEMS,
    "*.tools": TOOLS,
    "*.tool_choice": CHOICES,
    "*.ResponseTextConfigParam.format": FORMATS,
    "*.CustomToolParam.format": TEXT_FORMATS,
    "*.environment": ENVIRONMENTS,
    "*.ResponseReasoningItemParam.content": WITHIN,
    "*.content": MESSAGE_PARTS,
    "*.output": OUTPUT_PARTS,
    "*.action": WITHIN,
    "*.operation": WITHIN,
    "*.outcome": WITHIN,
}
"""Pattern of the path of a key -> the table of the types that it may hold."""


def row_of(path: str, kind: str) -> Row | None:
    rows: Mapping[str, Row] = next((rows for pattern, rows in PLACES.items() if fnmatchcase(path, pattern)), {})
    return rows.get(kind) or rows.get(hosted_type(kind) or "")


def request(value: Body) -> Body:
    """A request whose items are followed by a message of the user, and outputs have a call before them."""
    body = {**BASE, "input": [USER], **value}
    if isinstance(body["input"], list):
        (item,) = body["input"]
        if item.get("role") != "user":
            is_output = str(item.get("type")).endswith("_output")
            call = [{**CALL, "call_id": item.get("call_id") or item.get("id") or "x"}] if is_output else []
            body["input"] = [USER, *call, item, USER]
    return body


def completed(body: Body, http: httpx.Client) -> Body:
    """The request with what the SDK's types do not say that it needs: whatever it names is there."""
    form, choice = body.get("text", {}).get("format", {}), body.get("tool_choice")
    if form.get("type") == "json_schema":
        form |= {"name": "any", "schema": {"type": "object"}}
    items: list[Body] = body["input"] if isinstance(body["input"], list) else []
    for tool in (*body.get("tools", ()), *(tool for item in items for tool in item.get("tools", ()))):
        for one in (tool, *tool.get("tools", ())):
            if one.get("format", {}).get("syntax") == "lark":
                one["format"]["definition"] = 'start: "x"'
    if isinstance(choice, dict) and "tools" in choice:
        choice["tools"] = [{"type": "function", "name": "x"}]
    if choice is not None:
        named = choice["type"] if isinstance(choice, dict) and "mode" not in choice else "function"
        body["tools"] = [{"type": named, **({"name": "x"} if named in ("function", "custom") else {})}]
    if "top_logprobs" in body:
        body["include"] = ["message.output_text.logprobs"]

    def stored() -> Any:
        return http.post("/v1/responses", json={"input": "hi"}).json()

    if "previous_response_id" in body:
        body["previous_response_id"] = stored()["id"]
    for item in items:
        if set(item) <= {"id", "type"}:
            item["id"] = stored()["output"][0]["id"]
    return body


def included() -> Iterator[Sent]:
    for name, row in INCLUDES.items():
        yield Sent(
            f"responses.include.{name}", row.kind, [[name]], lambda value: request({"include": value}),
            lambda: request({}),
        )  # fmt: skip


ALL = [*Walk(row_of, VALUES).all(Params, ResponsesRequest, "responses", request), *included()]
ENFORCED = of_kind(ALL, "enforced")


def test_everything_that_the_sdk_can_send_has_a_kind() -> None:
    assert [sent.path for sent in ALL if sent.kind is None] == []
    assert len(ALL) > 500
    assert set(INCLUDES) == set(get_args(ResponseIncludable))
    choices = fields_of(Params)["tool_choice"]
    named = [name for typed in members(choices) for name in types_of(typed)]
    assert {hosted_type(name) or name for name in named} <= set(CHOICES)
    assert {word for one in get_args(choices) for word in words(one)} <= set(CHOICES)


def test_a_key_that_is_new_in_the_sdk_has_no_kind() -> None:
    assert ResponsesRequest.kind_of("temprature") is None
    assert row_of("responses.tools", "shelf") is None


def test_what_is_enforced_has_a_test() -> None:
    check_proofs(ENFORCED, PROOFS)


def test_each_word_and_an_example_of_all_that_is_enforced_is_taken(wide_http: httpx.Client) -> None:
    for sent in ENFORCED.values():
        for value in sent.values:
            body = completed(sent.body(value), wide_http)
            answer = wide_http.post("/v1/responses", json=body)
            assert answer.status_code == 200, (sent.path, value, body, answer.text)


@each(ALL, "hint")
def test_a_hint_changes_nothing_and_is_taken_in_silence(
    wide_http: httpx.Client, wide_router: ScriptedRouter, sent: Sent
) -> None:
    def ask(body: Body) -> tuple[httpx.Response, Any]:
        answer = wide_http.post("/v1/responses", json=completed(body, wide_http))
        assert answer.status_code == 200, (body, answer.text)
        submit, shown = wide_router.submits[-1], nameless(answer.json())
        made = {key: value for key, value in shown.items() if key not in (*ResponsesRequest.names, *TIMES)}
        return answer, (made, submit.prompt_ids, submit.params)

    check_hint(sent, ask)


@each(ALL, "offer")
def test_an_offer_is_taken_and_told(wide_http: httpx.Client, sent: Sent) -> None:
    check_offer(sent, lambda body: wide_http.post("/v1/responses", json=body), NOUNS.get(sent.name, ""))


@each(ALL, "demand")
def test_a_demand_is_refused_by_name_with_the_way_out(
    wide_http: httpx.Client, wide_router: ScriptedRouter, sent: Sent
) -> None:
    check_demand(sent, lambda body: wide_http.post("/v1/responses", json=body))
    assert wide_router.submits == []
