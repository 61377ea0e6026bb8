"""Each type and each key that Anthropic's SDK can send has a kind in our tables, and is treated as its kind says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anthropic.types as stable
import anthropic.types.beta as beta
import httpx
import pytest
from anthropic.types.beta import message_count_tokens_params as beta_counting
from anthropic.types.beta import message_create_params as beta_messages

from inferd.server.schema.anthropic import CountTokensRequest, MessagesRequest
from inferd.server.schema.anthropic_blocks import (
    ASSISTANT_BLOCKS,
    BLOCKS,
    CHANGE_PARTS,
    RESULT_BLOCKS,
    SOURCE_PARTS,
    SOURCES,
    SYSTEM_BLOCKS,
    TOOL_CHANGES,
    USER_BLOCKS,
)
from inferd.server.schema.anthropic_conversation import Turn
from inferd.server.schema.anthropic_parts import EDITS, THINKING, THOUGHTS
from inferd.server.schema.anthropic_tools import CALLER_TOOLS, CHOICES, TOOLS, USES
from inferd.server.schema.json_schema import schema_of
from inferd.server.schema.request_model import Kind, Part, Row, key_of
from inferd.server.schema.unread import SAY_IT

from .sdk_types import example, fields_of, hint_of, members, named_tests, types_of, value_of

WARNING = "x-inferd-warning"
ASK: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
CUSTOM: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
BASE: dict[str, Any] = {"max_tokens": 4, "messages": [ASK]}


def said(role: str, block: Any) -> list[Any]:
    """A conversation with a turn that holds a block."""
    text = {"type": "text", "text": "b"}
    if role == "user":
        return [{"role": "user", "content": [block]}]
    return [ASK, {"role": role, "content": [block, text]}, *([ASK] if role == "assistant" else ())]


def answered(block: Any) -> list[Any]:
    """A conversation whose newest tool result holds a block."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    return [ASK, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}]


@dataclass(frozen=True, slots=True)
class Place:
    """A union of types in a request."""

    rows: Mapping[str, Row]
    unions: tuple[Any, ...]
    """The SDK's types of it, stable and beta."""
    body: Callable[[dict[str, Any]], dict[str, Any]]
    """The fields of a request with a value of the union."""
    proof: Mapping[str, str] | str
    """Name of the test that shows an enforced row to be done; or of each row's."""
    parts: Mapping[str, Any]
    """Type -> the object that it is read as."""


_DOCUMENTS = "test_documents_are_texts"
_SAID = "test_what_anthropics_servers_wrote_is_read_as_its_text"
_LOADED = "test_a_deferred_tool_is_shown_from_its_reference_on_in_the_order_of_tools"
_CHANGED = "test_tools_are_added_and_removed_by_the_system"
_BLOCKS = {
    "text": "test_a_string_is_a_text_block_and_blocks_are_joined",
    "tool_result": "test_a_result_is_a_message_of_the_tools_own",
    "tool_use": "test_an_assistant_thinks_says_and_calls",
    "thinking": "test_an_assistant_thinks_says_and_calls",
    "document": _DOCUMENTS,
    "search_result": _DOCUMENTS,
    "tool_reference": _LOADED,
    "tool_addition": _CHANGED,
    "tool_removal": _CHANGED,
    "tool_search_tool_result": _LOADED,
    "browser_state": "test_the_state_of_a_browser_is_text",
    **dict.fromkeys((kind for kind in USER_BLOCKS if kind.endswith("_tool_result") and kind[:4] != "tool"), _SAID),
    "compaction": _SAID,
}
_OWN = "test_anthropics_own_tools_are_functions_with_their_commands"
_BASH = "test_the_bash_tool_has_a_command_and_the_editor_says_how_much_it_shows"
_SYSTEM = (hint_of(stable.SystemMessageParam, "content"), hint_of(beta.BetaSystemMessageParam, "content"))
_CONTENT = (stable.ContentBlockParam, beta.BetaContentBlockParam)


def _document(source: dict[str, Any]) -> dict[str, Any]:
    return {"messages": said("user", {"type": "document", "source": source})}


def part_of(place: str, kind: str) -> type[Part] | None:
    """The object that a type is read as; None: any object."""
    union = PLACES[place]
    part = union.parts.get(key_of(union.rows, kind) or "")
    return part if isinstance(part, type) and issubclass(part, Part) else None


def kind_of_key(part: type[Part] | None, key: str) -> Kind | None:
    """The kind of a key of an object. Of any object, all keys are read or not as its row says."""
    return "enforced" if part is None else part.kind_of(key)


PLACES: Mapping[str, Place] = {
    "tools": Place(
        TOOLS,
        (stable.ToolUnionParam, beta.BetaToolUnionParam),
        lambda tool: {"tools": [tool]},
        {
            "custom": "test_a_tool_is_a_function",
            **dict.fromkeys((kind for kind in CALLER_TOOLS if kind[:4] in ("text", "memo")), _OWN),
            **dict.fromkeys(("bash_20241022", "bash_20250124"), _BASH),
        },
        CALLER_TOOLS,
    ),
    "user": Place(USER_BLOCKS, _CONTENT, lambda block: {"messages": said("user", block)}, _BLOCKS, BLOCKS),
    "assistant": Place(
        ASSISTANT_BLOCKS, _CONTENT, lambda block: {"messages": said("assistant", block)}, _BLOCKS, BLOCKS
    ),
    "system": Place(SYSTEM_BLOCKS, _SYSTEM, lambda block: {"messages": said("system", block)}, _BLOCKS, BLOCKS),
    "tool_result": Place(
        RESULT_BLOCKS,
        (hint_of(stable.ToolResultBlockParam, "content"), hint_of(beta.BetaToolResultBlockParam, "content")),
        lambda block: {"messages": answered(block)},
        _BLOCKS,
        BLOCKS,
    ),
    "source": Place(
        SOURCES,
        tuple(
            hint_of(kind, "source")
            for kind in (
                stable.DocumentBlockParam,
                stable.ImageBlockParam,
                beta.BetaRequestDocumentBlockParam,
                beta.BetaImageBlockParam,
            )
        ),
        _document,
        _DOCUMENTS,
        SOURCE_PARTS,
    ),
    "change": Place(
        TOOL_CHANGES,
        (
            hint_of(beta.BetaRequestToolAdditionBlockParam, "tool"),
            hint_of(beta.BetaRequestToolRemovalBlockParam, "tool"),
        ),
        lambda tool: {"messages": said("system", {"type": "tool_addition", "tool": tool})},
        _CHANGED,
        CHANGE_PARTS,
    ),
    "tool_choice": Place(
        CHOICES,
        (stable.ToolChoiceParam, beta.BetaToolChoiceParam),
        lambda choice: {"tools": [{**CUSTOM, "name": "x"}], "tool_choice": choice},
        "test_a_choice_of_tools_becomes_a_grammar",
        USES,
    ),
    "thinking": Place(
        THINKING,
        (stable.ThinkingConfigParam, beta.BetaThinkingConfigParam),
        lambda thinking: {"thinking": thinking},
        "test_thinking_and_effort_reach_the_template",
        THOUGHTS,
    ),
    "edits": Place(
        EDITS,
        (hint_of(beta.BetaContextManagementConfigParam, "edits"),),
        lambda edit: {"context_management": {"edits": [edit]}},
        {},
        {},
    ),
}

EXAMPLES: Mapping[str, dict[str, Any]] = {
    "document": {"source": {"type": "text", "media_type": "text/plain", "data": "x"}},
    "clear_thinking_20251015": {"keep": {"type": "thinking_turns", "value": 1}},
}
"""Type -> keys whose first value would be another case."""

SENT: Mapping[tuple[str, str], Any] = {
    (place, kind): typed
    for place, union in PLACES.items()
    for hint in union.unions
    for typed in members(hint)
    for kind in types_of(typed)
}
"""(place, type) -> the SDK's newest declaration of it."""

MARKS = [
    (place, kind, key)
    for (place, kind), typed in SENT.items()
    for key in fields_of(typed)
    if kind_of_key(part_of(place, kind), key) in ("hint", "offer")
    and PLACES[place].rows[key_of(PLACES[place].rows, kind) or ""].kind == "enforced"
]
"""(place, type, key) of the keys that change nothing, or that offer what the server does not have."""


def sample(place: str, kind: str, **fields: Any) -> dict[str, Any]:
    return PLACES[place].body(example(SENT[place, kind], **{"type": kind, **EXAMPLES.get(kind, {}), **fields}))


def test_each_type_has_a_kind() -> None:
    assert len(SENT) > 100
    assert [(place, kind) for place, kind in SENT if key_of(PLACES[place].rows, kind) is None] == []


def test_each_key_of_a_type_has_a_kind() -> None:
    missing = [
        (place, kind, key)
        for place, union in PLACES.items()
        for hint in union.unions
        for typed in members(hint)
        for kind in types_of(typed)
        for key in fields_of(typed)
        if kind_of_key(part_of(place, kind), key) is None
    ]
    assert missing == []
    assert set(fields_of(beta.BetaSystemMessageParam)) <= set(Turn.names)
    (output, _) = schema_of(MessagesRequest)["properties"]["output_config"]["anyOf"]
    for typed in (stable.OutputConfigParam, beta.BetaOutputConfigParam):
        assert set(fields_of(typed)) <= set(output["properties"])


def test_each_enforced_type_has_a_test_of_its_own() -> None:
    proofs = {}
    for name, place in PLACES.items():
        for kind, row in place.rows.items():
            if row.kind == "enforced":
                proofs[name, kind] = place.proof if isinstance(place.proof, str) else place.proof.get(kind, "none")
    assert {at: test for at, test in proofs.items() if not named_tests([test])} == {}


@pytest.mark.parametrize(("place", "kind"), SENT)
def test_a_type_is_treated_as_its_kind_says(http: httpx.Client, router: Any, place: str, kind: str) -> None:
    rows = PLACES[place].rows
    row, body = rows[key_of(rows, kind) or ""], {**BASE, **sample(place, kind)}
    plain, streamed = (http.post("/v1/messages", json={**body, "stream": stream}) for stream in (False, True))
    if row.kind == "demand":
        assert plain.status_code == streamed.status_code == 400
        way_out = SAY_IT if "newest" in row.about else row.about
        assert way_out in plain.json()["error"]["message"]
        return
    assert plain.status_code == streamed.status_code == 200, plain.text
    assert (WARNING in plain.headers) == (WARNING in streamed.headers)
    if row.kind == "offer":
        assert kind in plain.headers[WARNING] or "omitted" in prompt(router)
    if row.kind == "hint":
        assert WARNING not in plain.headers
        if place == "assistant":
            http.post("/v1/messages", json={**body, "messages": [ASK, {"role": place, "content": "b"}, ASK]})
            assert router.submits[0].prompt_ids == router.submits[-1].prompt_ids


def prompt(router: Any) -> str:
    return str(router.model.tokenizer.decode(router.submits[-1].prompt_ids, skip_special=False))


@pytest.mark.parametrize(("place", "kind", "key"), MARKS)
def test_a_key_is_treated_as_its_kind_says(http: httpx.Client, router: Any, place: str, kind: str, key: str) -> None:
    value = {"enabled": True} if key == "citations" else value_of(hint_of(SENT[place, kind], key))
    bare, marked = ({**BASE, **sample(place, kind, **fields)} for fields in ({}, {key: value}))
    answers = [http.post("/v1/messages", json=body) for body in (bare, marked)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    assert router.submits[0].prompt_ids == router.submits[1].prompt_ids
    before, after = (answer.headers.get(WARNING, "") for answer in answers)
    if kind_of_key(part_of(place, kind), key) == "hint":
        assert before == after
    else:
        assert f"'{key}' is not used" in after and f"'{key}'" not in before
        streamed = http.post("/v1/messages", json={**marked, "stream": True})
        assert streamed.headers[WARNING] == after


FIELDS: Mapping[str, str] = {
    "messages": "test_a_conversation_with_tools_is_read_as_chats",
    "model": "test_what_comes_before_any_field",
    "max_tokens": "test_the_reasons_for_an_end",
    "system": "test_a_conversation_with_tools_is_read_as_chats",
    "tools": "test_a_tool_is_used",
    "tool_choice": "test_a_choice_of_tools_becomes_a_grammar",
    "thinking": "test_thinking_and_effort_reach_the_template",
    "output_config": "test_a_format_becomes_a_grammar",
    "output_format": "test_a_format_becomes_a_grammar",
    "stop_sequences": "test_a_stop_sequence_says_which",
    "stream": "test_the_bytes_of_a_stream",
    "temperature": "test_numbers_reach_the_sampler",
    "top_k": "test_numbers_reach_the_sampler",
    "top_p": "test_numbers_reach_the_sampler",
    "seed": "test_a_message_carries_its_seed_given_or_chosen_and_chats_fingerprint",
}
"""Field -> name of the test that shows it to be done."""

VALUES: Mapping[str, Any] = {
    "inference_geo": "us",
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "speed": "fast",
    "anthropic_beta": ["x"],
    "anthropic_version": "2023-06-01",
}
"""Fields whose first value in the SDK would be another case, or that only other platforms send."""

CREATE = {
    key: hint
    for typed in (
        stable.message_create_params.MessageCreateParamsNonStreaming,
        stable.message_create_params.MessageCreateParamsStreaming,
        beta_messages.MessageCreateParamsNonStreaming,
        beta_messages.MessageCreateParamsStreaming,
    )
    for key, hint in fields_of(typed).items()
}
COUNT = {
    key: hint
    for typed in (stable.message_count_tokens_params.MessageCountTokensParams, beta_counting.MessageCountTokensParams)
    for key, hint in fields_of(typed).items()
}


def test_each_field_has_a_kind() -> None:
    assert [key for key in CREATE if MessagesRequest.kind_of(key) is None] == []
    assert [key for key in COUNT if CountTokensRequest.kind_of(key) is None] == []
    enforced = {key for key in MessagesRequest.names if MessagesRequest.kind_of(key) == "enforced"}
    assert enforced == set(FIELDS)
    assert {key: test for key, test in FIELDS.items() if not named_tests([test])} == {}


@pytest.mark.parametrize("name", [*CREATE, "anthropic_beta", "anthropic_version"])
def test_a_field_is_treated_as_its_kind_says(http: httpx.Client, router: Any, name: str) -> None:
    kind = MessagesRequest.kind_of(name)
    if kind == "enforced":
        return  # it has a test of its own
    value = VALUES[name] if name in VALUES else value_of(CREATE[name]) or {"id": "x"}
    bare, plain, streamed = (
        http.post("/v1/messages", json={**BASE, **fields})
        for fields in ({}, {name: value}, {name: value, "stream": True})
    )
    if kind == "demand":
        assert plain.status_code == streamed.status_code == 400
        message = plain.json()["error"]["message"]
        assert name in message and (name in MessagesRequest.names or MessagesRequest.refused[name] in message)
        return
    assert bare.status_code == plain.status_code == streamed.status_code == 200, plain.text
    assert len({submit.prompt_ids for submit in router.submits}) == 1
    told = plain.headers.get(WARNING)
    assert told == streamed.headers.get(WARNING)
    if name in MessagesRequest.offered:
        assert told == f"'{name}' is not used: {MessagesRequest.offered[name]}"
    else:
        assert told is None if kind == "hint" else str(told).startswith(f"'{name}")
