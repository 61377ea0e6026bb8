"""Each type and each key that OpenAI's SDK can send to chat and completions has a kind, and is treated as it says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import httpx
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams

from inferd.server.schema.chat import TEXT_FORMATS, TOOLS_TAKEN, ChatRequest
from inferd.server.schema.chat_messages import CALLS
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.request_model import Row
from inferd.server.schema.structured import FORMATS
from inferd.server.schema.tool_choice import CHOICES
from inferd.server.schema.unread import CHAT_PARTS
from inferd.server.text.model import ServedModel
from tests.api.conftest import app_settings

from .conftest import ScriptedRouter, coder, serving
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

USER: Body = {"role": "user", "content": "hi"}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BASE: Body = {"model": "tiny", "max_tokens": 4, "seed": 1, "request_id": "one"}
VALUES: Mapping[str, Any] = {
    "chat.function_call": {"name": "f"},
    "chat.modalities": ["text", "audio"],
    "completions.best_of": 2,
    "chat.functions": [{"name": "f"}],
}
"""Values of demands; the first value of their types says nothing."""

_HISTORY, _OLDER = (
    "test_tools_and_earlier_calls_reach_the_model",
    "test_calls_and_results_of_the_older_form_are_read_as_the_newer",
)
_ANSWERS, _FORMATS = "test_an_answer_of_any_form_is_history", "test_fields_are_read"
_CUSTOM, _NAMED = "test_a_custom_tool_gets_a_text", "test_a_custom_tool_may_be_named_and_allowed"
_CHOICE, _TOOLS = "test_a_required_call_is_a_grammar", "test_calls_come_back_as_calls"
_GIVEN, _LIMIT = "test_what_is_given_wins", "test_a_limit_beyond_the_context_is_cut_and_told_once"
PROOFS: Mapping[str, str] = {
    "chat.*MessageParam.name": "test_names_reach_the_template",
    "chat.ChatCompletionFunctionMessageParam.*": _OLDER,
    "chat.*MessageParam.role": _HISTORY,
    "chat.*.ChatCompletionContentPartRefusalParam.*": _ANSWERS,
    "chat.*.ChatCompletionContentPartTextParam.*": _HISTORY,
    "chat.*.refusal": _ANSWERS,
    "chat.*.function_call": _OLDER,
    "chat.*.FunctionCall.*": _OLDER,
    "chat.*MessageCustomToolCallParam.*": _CUSTOM,
    "chat.*MessageFunctionToolCallParam.*": _HISTORY,
    "chat.*MessageParam.*": _HISTORY,
    "chat.messages": _HISTORY,
    "*.model": "test_models_are_known_by_all_their_names",
    "chat.max_*": _LIMIT,
    "completions.max_tokens": _LIMIT,
    "chat.n": "test_every_choice_is_a_submit_with_its_own_id_seed_and_room",
    "completions.n": "test_choices_are_numbered_by_prompt",
    "chat.logprobs": "test_logprobs_are_of_every_token_with_its_bytes",
    "chat.top_logprobs": "test_logprobs_are_of_every_token_with_its_bytes",
    "completions.logprobs": "test_the_chosen_token_is_always_among_the_likely_ones",
    "chat.parallel_tool_calls": "test_one_call_ends_the_answer_where_no_second_is_wanted",
    "chat.reasoning_effort": "test_reasoning_effort_has_the_templates_own_name",
    "chat.response_format": _FORMATS,
    "chat.ResponseFormat*": _FORMATS,
    "*.stop": "test_a_stop_string_is_never_seen",
    "*.stream": "test_a_stream_says_what_a_plain_answer_says",
    "*.stream_options": "test_usage_comes_only_where_asked_for",
    "*.include_usage": "test_usage_comes_only_where_asked_for",
    "chat.ChatCompletionNamedToolChoiceCustomParam.*": _NAMED,
    "chat.ChatCompletionAllowedToolChoiceParam.*": _NAMED,
    "chat.*ToolChoice*": _CHOICE,
    "chat.tool_choice": _CHOICE,
    "chat.tools": _TOOLS,
    "chat.*FunctionDefinition.strict": "test_calls_are_held_to_what_was_asked",
    "chat.ChatCompletionFunctionToolParam.*": _TOOLS,
    "chat.*CustomFormatGrammar*": "test_the_text_of_a_custom_tool_follows_its_grammar_in_each_format",
    "chat.ChatCompletionCustomToolParam.*": _CUSTOM,
    "completions.prompt": "test_text_and_ids_are_one_prompt",
    "completions.suffix": "test_a_completion_between_two_texts",
    "completions.echo": "test_echo_without_scores",
    **{
        f"*.{name}": _GIVEN
        for name in ("frequency_penalty", "presence_penalty", "logit_bias", "seed", "temperature", "top_p")
    },
}
"""Pattern of paths -> the test that shows that such a key is done. The first pattern that fits counts."""


def row_of(path: str, kind: str) -> Row | None:
    """The row of a type in the first table that has it: no two say different things of one."""
    del path
    tables = (TOOLS_TAKEN, CHOICES, FORMATS, TEXT_FORMATS, CALLS, CHAT_PARTS["user"])
    return next((rows[kind] for rows in tables if kind in rows), None)


def chat(value: Body) -> Body:
    """A chat whose answers and results are followed by a message of the user."""
    (message,) = value["messages"]
    messages = [message] if message["role"] == "user" else [USER, message, USER]
    return {**value, **BASE, "messages": messages, "stream": "stream_options" in value}


def text(value: Body) -> Body:
    return {**value, **BASE, "stream": "stream_options" in value}


WALK = Walk(row_of, VALUES)
ALL = [
    *WALK.all(ChatParams, ChatRequest, "chat", chat),
    *WALK.all(CompletionParams, CompletionRequest, "completions", text),
]
ENFORCED = of_kind(ALL, "enforced")


@pytest.fixture(scope="module")
def shared_router(model: ServedModel) -> ScriptedRouter:
    """The router of a model that can fill in the middle: the SDK has a field for that."""
    return ScriptedRouter(coder(model))


@pytest.fixture(scope="module")
def shared_url(shared_router: ScriptedRouter) -> Iterator[str]:
    with serving(shared_router.model, shared_router, app_settings(access_log=False)) as url:
        yield url


def test_everything_that_the_sdk_can_send_has_a_kind() -> None:
    assert [sent.path for sent in ALL if sent.kind is None] == []
    assert len(ALL) > 150
    choices = fields_of(ChatParams)["tool_choice"]
    named = [name for typed in members(choices) for name in types_of(typed)]
    assert set(CHOICES) == {*named, *(word for one in get_args(choices) for word in words(one))}


def test_a_key_that_is_new_in_the_sdk_has_no_kind() -> None:
    assert ChatRequest.kind_of("temprature") is None
    assert CompletionRequest.kind_of("modalities") is None


def test_what_is_enforced_has_a_test() -> None:
    check_proofs(ENFORCED, PROOFS)


@pytest.mark.parametrize("api", PATHS)
def test_each_word_and_an_example_of_all_that_is_enforced_is_taken(http: httpx.Client, api: str) -> None:
    for sent in ENFORCED.values():
        for value in sent.values if sent.api == api else ():
            body = completed(sent.body(value))
            answer = http.post(PATHS[api], json=body)
            assert answer.status_code == 200, (sent.path, value, body, answer.text)


def ask(http: httpx.Client, router: ScriptedRouter, sent: Sent, body: Body) -> tuple[httpx.Response, Any]:
    """(the answer, all that the engine and the caller see of the request)."""
    answer = http.post(PATHS[sent.api], json=completed(body))
    assert answer.status_code == 200, (sent.path, body, answer.text)
    submit = router.submits[-1]
    return answer, (re.sub(r'"created":\d+', "", answer.text), submit.prompt_ids, submit.params)


@each(ALL, "hint")
def test_a_hint_changes_nothing_and_is_taken_in_silence(http: httpx.Client, router: ScriptedRouter, sent: Sent) -> None:
    check_hint(sent, lambda body: ask(http, router, sent, body))


def completed(body: Body) -> Body:
    """The request with what the SDK's types do not say that it needs."""
    form, choice = body.get("response_format", {}), body.get("tool_choice")
    if "json_schema" in form:
        form["json_schema"] = {"name": "any", "schema": {"type": "object"}, **form["json_schema"]}
    for tool in body.get("tools", ()):
        grammar = tool.get("custom", {}).get("format", {}).get("grammar", {})
        if grammar.get("syntax") == "lark":
            grammar["definition"] = 'start: "x"'
    if isinstance(choice, dict) and "allowed_tools" in choice:
        choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "x"}}]
    if "tool_choice" in body or "parallel_tool_calls" in body:
        kind = "custom" if isinstance(choice, dict) and "custom" in choice else "function"
        body["tools"] = [{"type": kind, kind: {"name": "x"}}]
    return {**body, "logprobs": True} if "top_logprobs" in body else body


@each(ALL, "offer")
def test_an_offer_is_taken_and_told(http: httpx.Client, sent: Sent) -> None:
    check_offer(sent, lambda body: http.post(PATHS[sent.api], json=body))


@each(ALL, "demand")
def test_a_demand_is_refused_by_name_with_the_way_out(http: httpx.Client, router: ScriptedRouter, sent: Sent) -> None:
    check_demand(sent, lambda body: http.post(PATHS[sent.api], json=body))
    assert router.submits == []
