"""Every declared field of every request type: wrong types, each bound, and one step beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from inferd.engine.api.errors import RequestError
from inferd.server.errors import messages as errors
from inferd.server.errors import table
from inferd.server.schema.anthropic import CountTokensRequest, MessagesRequest
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.embedding_dialects import (
    CohereEmbedRequest,
    LlamaCppEmbeddingRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    PoolingRequest,
    TeiEmbedRequest,
)
from inferd.server.schema.embeddings import EmbeddingRequest
from inferd.server.schema.generation import OUTPUT, PROMPT, REQUEST, SAMPLING, STOPPING, TOOLS
from inferd.server.schema.infill import InfillRequest
from inferd.server.schema.json_schema import Schema, schema_of, types_of
from inferd.server.schema.request_model import RequestModel, read
from inferd.server.schema.responses import InputItemsQuery, ResponsesRequest, RetrieveQuery
from inferd.server.schema.tokenize import DetokenizeRequest, TokenizeRequest

BASES: dict[type[RequestModel], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"prompt": "x"},
    InfillRequest: {},
    EmbeddingRequest: {"input": "x"},
    PoolingRequest: {"input": "x"},
    CohereEmbedRequest: {"texts": ["x"]},
    TeiEmbedRequest: {"inputs": "x"},
    OllamaEmbedRequest: {"input": "x"},
    OllamaEmbeddingsRequest: {"prompt": "x"},
    LlamaCppEmbeddingRequest: {"content": "x"},
    MessagesRequest: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    CountTokensRequest: {"messages": [{"role": "user", "content": "x"}]},
    ResponsesRequest: {"input": "x"},
    RetrieveQuery: {},
    InputItemsQuery: {},
    TokenizeRequest: {},
    DetokenizeRequest: {"tokens": [1]},
}
FIELDS = [(base, name) for base in BASES for name in base.names]
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


def field(base: type[RequestModel], name: str) -> Schema:
    """The schema of one field."""
    schema: Schema = schema_of(base)["properties"][name]
    return schema


def bounds(schema: Schema) -> Iterator[tuple[Any, Any, str]]:
    """(last allowed value, first refused value, code of the refusal)."""
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    others = [value for option in options for value in option.get("enum", ())]
    for option in options:
        # A bound beside a value that is taken too is not the last that is refused.
        yield from (bound for bound in own_bounds(option) if bound[1] not in others)


def own_bounds(schema: Schema) -> Iterator[tuple[Any, Any, str]]:
    if "enum" in schema:
        return
    kinds = types_of(schema) - {"null"}
    for kind, name, step in (("integer", "integer", 1), ("number", "decimal", 1e-6)):
        if kind in kinds:
            low, high = schema.get("minimum"), schema.get("maximum")
            if low is not None:
                yield low, low - step, f"{name}_below_min_value"
            if high is not None:
                yield high, high + step, f"{name}_above_max_value"
    if kinds == {"string"}:
        low, high = schema.get("minLength"), schema.get("maxLength")
        yield from lengths("x", "", low, high, "empty_string", "string_above_max_length")
    if kinds == {"array"} and types_of(schema["items"]) in ({"integer"}, {"string"}):
        one = [1] if types_of(schema["items"]) == {"integer"} else [schema["items"].get("enum", ["x"])[0]]
        low, high = schema.get("minItems"), schema.get("maxItems")
        yield from lengths(one, [], low, high, "empty_array", "array_above_max_length")


def lengths(
    one: Any, none: Any, low: int | None, high: int | None, too_short: str, too_long: str
) -> Iterator[tuple[Any, Any, str]]:
    if low == 1:
        yield one, none, too_short
    if high is not None:
        yield one * high, one * (high + 1), too_long


def refusal(base: type[RequestModel], name: str, value: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(base, {**BASES[base], name: value})
    return caught.value


@pytest.mark.parametrize(("base", "name"), FIELDS, ids=ids)
def test_bounds_hold_to_the_last_value(base: type[RequestModel], name: str) -> None:
    for within, beyond, code in bounds(field(base, name)):
        read(base, {**BASES[base], name: within})
        error = refusal(base, name, beyond)
        assert (error.code, error.param) == (code, name)


def accepts(schema: Schema, value: Any) -> bool:
    """Whether the JSON type is right, without bounds. Of a list, it checks the first item too."""
    if ("enum" in schema and "type" not in schema) or not types_of(schema):
        return True
    for option in [schema] if "type" in schema else schema.get("anyOf", [schema]):
        for kind in types_of(option):
            if isinstance(value, list) and kind == "array":
                if not value or accepts(option["items"], value[0]):
                    return True
            elif Draft202012Validator({"type": kind}).is_valid(value):
                return True
    return False


@pytest.mark.parametrize(("base", "name"), FIELDS, ids=ids)
def test_every_other_type_is_refused_by_name(base: type[RequestModel], name: str) -> None:
    schema = field(base, name)
    if any("enum" in option and "type" not in option for option in schema.get("anyOf", [schema])):
        return  # what is not among a few values is refused as a value
    for value in EVERY_TYPE:
        if accepts(schema, value):
            continue
        error = refusal(base, name, value)
        assert error.code == "invalid_type"
        if error.param == name:
            assert error.message.endswith(f"but got {errors.json_type(value)} instead.")
        else:
            assert error.param == f"{name}[0]", "of a list, the item that is wrong is named"


@pytest.mark.parametrize(("base", "name"), FIELDS, ids=ids)
def test_nothing_escapes_but_a_refusal(base: type[RequestModel], name: str) -> None:
    for value in HOSTILE:
        refused = refused_or_none(base, name, value)
        assert refused is None or len(str(table.body_of(refused))) < 2_000
        assert refused is None or refused.code in table.ROWS


def refused_or_none(base: type[RequestModel], name: str, value: Any) -> RequestError | None:
    try:
        read(base, {**BASES[base], name: value})
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize("base", BASES)
def test_null_is_not_given(base: type[RequestModel]) -> None:
    optional = [name for name in base.names if name not in base.required]
    nothing = dict.fromkeys(name for name in optional if name not in BASES[base])
    assert read(base, {**BASES[base], **nothing}) == read(base, BASES[base])


@pytest.mark.parametrize("base", BASES)
def test_a_required_field_is_missed(base: type[RequestModel]) -> None:
    for name in base.required:
        others = {key: value for key, value in BASES[base].items() if key != name}
        for body in (others, {**others, name: None}):
            with pytest.raises(RequestError) as caught:
                read(base, body)
            assert (caught.value.code, caught.value.param) == ("missing_required_parameter", name)


@pytest.mark.parametrize("base", [ChatRequest, CompletionRequest, InfillRequest, MessagesRequest, ResponsesRequest])
def test_what_is_not_served_is_refused_with_a_way_out(base: type[RequestModel]) -> None:
    assert not set(base.refused) & {*base.names, *base.aliases}
    for name, way_out in base.refused.items():
        error = refusal(base, name, "x")
        assert (error.code, error.param) == ("unsupported_parameter", name)
        assert error.message.endswith(way_out)
        assert way_out
        read(base, {**BASES[base], name: None})


@pytest.mark.parametrize("base", [ChatRequest, CompletionRequest])
def test_an_alias_is_read_as_its_field_and_refused_under_its_own_name(base: type[RequestModel]) -> None:
    assert base.aliases
    for alias, name in base.aliases.items():
        assert name in base.names
        value = "x" if alias == "rid" else True
        assert read(base, {**BASES[base], alias: value}) == read(base, {**BASES[base], name: value})
        assert read(base, {**BASES[base], alias: None, name: value}) == read(base, {**BASES[base], name: value})
        assert refusal(base, alias, {}).param == alias
        with pytest.raises(RequestError, match=f"Only one of '{name}' and '{alias}'"):
            read(base, {**BASES[base], alias: value, name: value})


@pytest.mark.parametrize("base", [ChatRequest, CompletionRequest, InfillRequest, MessagesRequest, ResponsesRequest])
def test_every_field_says_what_it_does_and_what_holds_without_it(base: type[RequestModel]) -> None:
    for name in base.names:
        schema = field(base, name)
        assert schema["description"], name
        if schema["x-has-effect"]:
            assert name in base.required or schema["x-unset"], name
            assert schema["x-area"] in {REQUEST, PROMPT, SAMPLING, STOPPING, OUTPUT, TOOLS}, name


def test_documented_names_are_known() -> None:
    """Every field that clients of other servers send is served or refused by name, never "unknown"."""
    documented = DOCUMENTED.split()
    assert set(documented) <= {*ChatRequest.names, *ChatRequest.refused, *ChatRequest.aliases}
    text_only = {"prompt", "echo", "suffix", "best_of"}
    assert text_only <= set(CompletionRequest.names)


@pytest.mark.parametrize(("base", "name"), FIELDS, ids=ids)
def test_what_is_read_is_what_the_schema_says(base: type[RequestModel], name: str) -> None:
    """The reverse may not hold, because token ids and schemas have rules that a JSON schema cannot express."""
    schema = field(base, name)
    Draft202012Validator.check_schema(schema)
    describes = Draft202012Validator(schema)
    within = [value for bound in bounds(schema) for value in bound[:2]]
    for value in (*HOSTILE, *within):
        if value is not None and refused_or_none(base, name, value) is None:
            assert describes.is_valid(value), value
    for _, beyond, _ in bounds(schema):
        assert not describes.is_valid(beyond), beyond


def test_a_type_that_bounds_nothing_says_so() -> None:
    """Only these fields may have no bound, because their values cost nothing but bytes."""
    unbounded = {"integer", "string", "object", "boolean"}
    for base, name in FIELDS:
        schema = {key: value for key, value in field(base, name).items() if key[:2] != "x-" and key != "description"}
        if set(schema) == {"type"}:
            assert types_of(schema) - {"null"} <= unbounded, f"{base.__name__}.{name}"
