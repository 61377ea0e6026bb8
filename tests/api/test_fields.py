"""Every declared field of every request type: wrong types, and one step past each bound, in and out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from inferd.engine.api.errors import RequestError
from inferd.server.errors import table as errors
from inferd.server.schema.anthropic import CountTokensRequest, MessagesRequest
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.embeddings import EmbeddingRequest
from inferd.server.schema.fields import RequestFields, read, wire_fields
from inferd.server.schema.generation import OUTPUT, PROMPT, REQUEST, SAMPLING, STOPPING, TOOLS
from inferd.server.schema.kinds import Array, Decimal, Integer, Kind, OneOrMany, OrNotGiven, Text, TokenIds
from inferd.server.schema.responses import InputItemsQuery, ResponsesRequest, RetrieveQuery
from inferd.server.schema.tokenize import DetokenizeRequest, TokenizeRequest

BASES: dict[type[RequestFields], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"prompt": "x"},
    EmbeddingRequest: {"input": "x"},
    MessagesRequest: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    CountTokensRequest: {"messages": [{"role": "user", "content": "x"}]},
    ResponsesRequest: {"input": "x"},
    RetrieveQuery: {},
    InputItemsQuery: {},
    TokenizeRequest: {},
    DetokenizeRequest: {"tokens": [1]},
}
FIELDS = [(base, name) for base in BASES for name in wire_fields(base)]
ids = [f"{base.__name__}.{name}" for base, name in FIELDS]
DOCUMENTED = """
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty response_format seed stop stream stream_options temperature top_p user tools tool_choice
    parallel_tool_calls reasoning_effort metadata store service_tier top_k min_p repetition_penalty min_tokens
    stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens spaces_between_special_tokens bad_words
    allowed_token_ids prompt_logprobs add_generation_prompt continue_final_message add_special_tokens
    chat_template_kwargs documents truncate_prompt_tokens structured_outputs priority cache_salt request_id
    return_token_ids thinking_token_budget include_reasoning repetition_detection timeout regex ebnf rid
    no_stop_trim lora_path guided_json chat_template
"""
EVERY_TYPE: tuple[Any, ...] = (True, 1, 1.5, "x", ["x"], [1], [1.5], [{}], {"x": None})

HOSTILE: tuple[Any, ...] = (
    *EVERY_TYPE, 10**400, -(10**400), float("inf"), float("nan"), "\ud800", "\0", "", [[]], [[[1]]], {"": {}},
    ["x" * 10**5],
)  # fmt: skip


def bounds(kind: Kind) -> Iterator[tuple[Any, Any, str]]:
    """(the last value within, the first one beyond, the code of its refusal)."""
    match kind:
        case OrNotGiven(inner, _):
            # A bound beside a value for "not given" is not the last that is refused.
            yield from (bound for bound in bounds(inner) if bound[1] not in kind.unset_values)
        case Integer(low, high):
            if low is not None:
                yield low, low - 1, "integer_below_min_value"
            if high is not None:
                yield high, high + 1, "integer_above_max_value"
        case Decimal(low_f, high_f):
            yield low_f, low_f - 1e-6, "decimal_below_min_value"
            yield high_f, high_f + 1e-6, "decimal_above_max_value"
        case Text(low_n, high_n):
            yield from lengths("x", "", low_n, high_n, "empty_string", "string_above_max_length")
        case TokenIds(low_n, high_n):
            yield from lengths([1], [], low_n, high_n, "empty_array", "array_above_max_length")
        case Array(Text(), low_n, high_n):
            yield from lengths(["x"], [], low_n, high_n, "empty_array", "array_above_max_length")
        case OneOrMany(_, high_n):
            yield from lengths(["x"], [], 0, high_n, "", "array_above_max_length")
        case _:
            return


def lengths(
    one: Any, none: Any, low: int, high: int | None, too_short: str, too_long: str
) -> Iterator[tuple[Any, Any, str]]:
    if low == 1:
        yield one, none, too_short
    if high is not None:
        yield one * high, one * (high + 1), too_long


def refusal(base: type[RequestFields], name: str, value: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(base, {**BASES[base], name: value})
    return caught.value


@pytest.mark.parametrize(("base", "name"), FIELDS, ids=ids)
def test_bounds_hold_to_the_last_value(base: type[RequestFields], name: str) -> None:
    for within, beyond, code in bounds(wire_fields(base)[name].kind):
        read(base, {**BASES[base], name: within})
        error = refusal(base, name, beyond)
        assert (error.code, error.param) == (code, name)


@pytest.mark.parametrize(("base", "name"), FIELDS, ids=ids)
def test_every_other_type_is_refused_by_name(base: type[RequestFields], name: str) -> None:
    kind = wire_fields(base)[name].kind
    for value in EVERY_TYPE:
        if kind.accepts(value):
            continue
        error = refusal(base, name, value)
        assert error.code == "invalid_type"
        if error.param == name:
            assert error.message.endswith(f"but got {errors.json_type(value)} instead.")
            assert f"expected {kind.name}" in error.message
        else:
            assert error.param == f"{name}[0]", "of a list, the item that is wrong is named"


@pytest.mark.parametrize(("base", "name"), FIELDS, ids=ids)
def test_nothing_escapes_but_a_refusal(base: type[RequestFields], name: str) -> None:
    for value in HOSTILE:
        refused = refused_or_none(base, name, value)
        assert refused is None or len(str(errors.body_of(refused))) < 2_000
        assert refused is None or refused.code in errors.ROWS


def refused_or_none(base: type[RequestFields], name: str, value: Any) -> RequestError | None:
    try:
        read(base, {**BASES[base], name: value})
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize("base", BASES)
def test_null_is_not_given(base: type[RequestFields]) -> None:
    optional = [name for name, declared in wire_fields(base).items() if not declared.required]
    nothing = dict.fromkeys(name for name in optional if name not in BASES[base])
    assert read(base, {**BASES[base], **nothing}) == read(base, BASES[base])


@pytest.mark.parametrize("base", BASES)
def test_a_required_field_is_missed(base: type[RequestFields]) -> None:
    for name, declared in wire_fields(base).items():
        if declared.required:
            others = {key: value for key, value in BASES[base].items() if key != name}
            for body in (others, {**others, name: None}):
                with pytest.raises(RequestError) as caught:
                    read(base, body)
                assert (caught.value.code, caught.value.param) == ("missing_required_parameter", name)


@pytest.mark.parametrize("base", [ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest])
def test_what_is_not_served_is_refused_with_a_way_out(base: type[RequestFields]) -> None:
    assert not set(base.refused) & {*wire_fields(base), *base.aliases}
    for name, way_out in base.refused.items():
        error = refusal(base, name, "x")
        assert (error.code, error.param) == ("unsupported_parameter", name)
        assert error.message.endswith(way_out)
        assert way_out
        read(base, {**BASES[base], name: None})


@pytest.mark.parametrize("base", [ChatRequest, CompletionRequest])
def test_an_alias_is_read_as_its_field_and_refused_under_its_own_name(base: type[RequestFields]) -> None:
    assert base.aliases
    for alias, name in base.aliases.items():
        assert name in wire_fields(base)
        value = "x" if alias == "rid" else True
        assert read(base, {**BASES[base], alias: value}) == read(base, {**BASES[base], name: value})
        assert read(base, {**BASES[base], alias: None, name: value}) == read(base, {**BASES[base], name: value})
        assert refusal(base, alias, {}).param == alias
        with pytest.raises(RequestError, match=f"Only one of '{name}' and '{alias}'"):
            read(base, {**BASES[base], alias: value, name: value})


@pytest.mark.parametrize("base", [ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest])
def test_every_field_says_what_it_does_and_what_holds_without_it(base: type[RequestFields]) -> None:
    for name, declared in wire_fields(base).items():
        assert declared.about, name
        if declared.has_effect:
            assert declared.required or declared.unset, name
            assert declared.area in {REQUEST, PROMPT, SAMPLING, STOPPING, OUTPUT, TOOLS}, name


def test_documented_names_are_known() -> None:
    """Every field that clients of other servers send is served or refused by name, never "unknown"."""
    documented = DOCUMENTED.split()
    assert set(documented) <= {*wire_fields(ChatRequest), *ChatRequest.refused, *ChatRequest.aliases}
    text_only = {"prompt", "echo", "suffix", "best_of"}
    assert text_only <= set(wire_fields(CompletionRequest))


@pytest.mark.parametrize(("base", "name"), FIELDS, ids=ids)
def test_what_is_read_is_what_the_schema_says(base: type[RequestFields], name: str) -> None:
    """The other way round need not hold: token ids and schemas have rules that a JSON schema does not tell."""
    kind = wire_fields(base)[name].kind
    schema = kind.schema()
    Draft202012Validator.check_schema(schema)
    describes = Draft202012Validator(schema)
    within = [value for bound in bounds(kind) for value in bound[:2]]
    for value in (*HOSTILE, *within):
        if value is not None and refused_or_none(base, name, value) is None:
            assert describes.is_valid(value), value
    for _, beyond, _ in bounds(kind):
        assert not describes.is_valid(beyond), beyond


def test_a_kind_that_bounds_nothing_says_so() -> None:
    """A field without any bound is one of these, whose values cost nothing but bytes."""
    unbounded = {"integer", "string", "object", "boolean"}
    for base, name in FIELDS:
        schema = wire_fields(base)[name].kind.schema()
        if set(schema) == {"type"}:
            assert schema["type"] in unbounded, f"{base.__name__}.{name}"
