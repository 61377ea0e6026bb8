"""Parts of a schema that cannot be enforced: told if the schema is not strict, refused by path and keyword if it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.grammar_check import MAX_LEFT, Verdict
from inferd.engine.grammar.check import judge
from inferd.engine.grammar.compiler import compile_grammar
from inferd.engine.grammar.vocabulary import load_vocabulary
from inferd.server.generate.answer_rules import answer_rules
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.request_model import read
from inferd.server.structured.schema import LEAVE_OUT, OR_NOT_STRICT, read_schema
from inferd.server.text.model import ServedModel

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
PATH = "tools[0].function.parameters"
CASES: dict[str, tuple[dict[str, Any], str, Any]] = {
    # name: (schema of a property, the keyword in the notice, a value that the grammar must still accept)
    "a look-ahead": ({"type": "string", "pattern": "^(?=.*[a-z])x"}, "pattern", "x"),
    "a look-behind": ({"type": "string", "pattern": "(?<!a)b"}, "pattern", "b"),
    "the edge of a word": ({"type": "string", "pattern": r"\bfoo\b"}, "pattern", "foo"),
    "a group that is repeated": ({"type": "string", "pattern": r"(a)\1"}, "pattern", "aa"),
    "an open class": ({"type": "string", "pattern": "[a"}, "pattern", "a"),
    "a pattern that is no text": ({"type": "string", "pattern": 3}, "pattern", "a"),
    "a pattern of names": ({"patternProperties": {"(?=a)": {"type": "integer"}}}, "patternProperties", {"a": 1}),
    "patterns of names that overlap": (
        {"type": "object", "patternProperties": {"a": {"type": "integer"}, "b": {}}}, "patternProperties", {"c": 1}),
    "a reference to nothing": ({"$ref": "#/$defs/nope"}, "$ref", 1),
    "a reference to a host": ({"$ref": "https://example.com/schema.json"}, "$ref", 1),
    "a reference to an anchor": ({"$ref": "#here"}, "$ref", 1),
    "a reference to an item far behind": ({"$ref": "#/required/" + "9" * 5_000}, "$ref", 1),
    "multiples of all of these": (
        {"type": "integer", "allOf": [{"multipleOf": 2**1_000 + 2 * i + 1} for i in range(16)]}, "allOf", 1),
    "an unknown type": ({"type": "any"}, "type", {"a": [1]}),
    "an unknown type among others": ({"type": ["string", "date"]}, "type", "a"),
    "a type that is no text": ({"type": 3}, "type", "a"),
    "an empty enum": ({"enum": []}, "enum", "a"),
    "an enum that is no list": ({"enum": "a"}, "enum", "a"),
    "an unknown format": ({"type": "string", "format": "regex"}, "format", "a"),
    "a length below 0": ({"type": "string", "maxLength": -1}, "maxLength", "a"),
    "a bound that is no number": ({"type": "integer", "minimum": "3"}, "minimum", 1),
    "multiples of 0": ({"type": "integer", "multipleOf": 0}, "multipleOf", 1),
    "properties that are no object": ({"type": "object", "properties": []}, "properties", {"a": 1}),
    "required that is no list": ({"type": "object", "required": True}, "required", {}),
    "items that are no schema": ({"type": "array", "items": 3}, "items", [1]),
    "not": ({"not": {"const": 3}}, "not", 3),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains", [2]),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems", [1, 1]),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, "propertyNames", {"ab": 1}),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 50}}, "if", "a"),
    "then": ({"if": {"type": "string"}, "then": {"minLength": 50}}, "then", "a"),
    "else": ({"if": {"type": "string"}, "else": {"minimum": 50}}, "else", 3),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", {"a": 1}),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties", {"a": 1}),
    "alternatives that overlap": ({"oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf", 3),
    "a number of properties": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}, "minProperties", {"a": 1}),
    "a number of free names": (
        {"type": "object", "properties": {"b": {}}, "required": ["b"], "minProperties": 3}, "minProperties",
        {"b": 1, "c": 2, "d": 3}),
    "a keyword of no draft": ({"type": "string", "mustBe": "nice"}, "mustBe", "a"),
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(MODEL_PATH, 3_072)


def whole(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"n": {"type": "null"}, "a": inner}, "required": ["n", "a"]}


def verdict_on(vocabulary: LLTokenizer, schema: Any, *, is_strict: bool, way_out: str = OR_NOT_STRICT) -> Verdict:
    language = read_schema(schema, PATH, is_strict=is_strict, way_out=way_out, tool="get_rain")
    return judge(vocabulary, language.text())


def accepts(vocabulary: LLTokenizer, verdict: Verdict, text: str) -> bool:
    matcher, token_ids = compile_grammar(vocabulary, verdict.text), vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", CASES)
def test_a_part_that_cannot_be_enforced_is_left_to_the_model_and_told(vocabulary: LLTokenizer, name: str) -> None:
    inner, keyword, value = CASES[name]
    verdict = verdict_on(vocabulary, whole(inner), is_strict=False)
    assert not verdict.error
    told = [left for left in verdict.left if left.text.startswith(f"'{PATH}.properties.a.{keyword}")]
    assert len(told) == 1 and not told[0].is_whole, verdict.left
    assert "'get_rain' is left to the model: " in told[0].text
    assert accepts(vocabulary, verdict, json.dumps({"n": None, "a": value}))
    assert not accepts(vocabulary, verdict, json.dumps({"n": 1, "a": value})), "the rest is enforced"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way_out", [LEAVE_OUT, OR_NOT_STRICT])
def test_the_same_part_of_a_strict_schema_is_refused_by_its_path(
    vocabulary: LLTokenizer, name: str, way_out: str
) -> None:
    inner, keyword, _ = CASES[name]
    try:
        message = verdict_on(vocabulary, whole(inner), is_strict=True, way_out=way_out).error
    except RequestError as error:
        message = error.message
    other = "if" if keyword in ("then", "else") else keyword
    assert f"'{PATH}.properties.a.{other}" in message
    assert "get_rain" in message and message.rstrip(".").endswith(way_out.rstrip("."))


def test_a_schema_that_allows_nothing_is_left_as_a_whole(vocabulary: LLTokenizer) -> None:
    schema = whole({"allOf": [{"type": "string"}, {"type": "integer"}]})
    verdict = verdict_on(vocabulary, schema, is_strict=False)
    (left,) = verdict.left
    assert left.is_whole and left.text.startswith(f"'{PATH}' of the tool 'get_rain' is left to the model: ")
    assert "required property 'a' allows no value" in left.text
    assert accepts(vocabulary, verdict, '{"a": 3}') and not accepts(vocabulary, verdict, "3")
    assert "required property 'a'" in verdict_on(vocabulary, schema, is_strict=True).error


def test_parameters_are_an_object_whatever_their_type_says(vocabulary: LLTokenizer) -> None:
    tool = {"type": "function", "function": {"name": "get_rain", "parameters": {"type": "any"}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"}
    model = ServedModel.load(MODEL_PATH, ("m",), max_model_len=256, vocab_size=3_072)
    rules = answer_rules(read(ChatRequest, body), model, "", None)
    assert rules.answer is not None
    (left,) = judge(vocabulary, rules.answer.language.text()).left
    assert left.text.startswith(f"'{PATH}.type' of the tool 'get_rain' is left to the model: ")


def test_notices_are_bounded(vocabulary: LLTokenizer) -> None:
    many = {"type": "object", "properties": {f"p{i}": {"not": {}} for i in range(300)}}
    verdict = verdict_on(vocabulary, many, is_strict=False)
    assert len(verdict.left) == MAX_LEFT and max(len(left.text) for left in verdict.left) < 400


def test_annotations_are_taken_in_silence(vocabulary: LLTokenizer) -> None:
    inner = {"type": "string", "title": "x", "default": "y", "examples": [1], "deprecated": True, "$comment": "z"}
    assert verdict_on(vocabulary, whole(inner), is_strict=False).left == ()
    assert verdict_on(vocabulary, whole(inner), is_strict=True).error == ""


@pytest.mark.parametrize("additional", [True, {"type": "integer"}])
def test_one_free_name_counts_and_two_may_be_the_same(vocabulary: LLTokenizer, additional: Any) -> None:
    """A grammar cannot tell a repeated name from another one."""
    schema = {"type": "object", "properties": {"a\n": {}}, "required": ["a\n"], "additionalProperties": additional}
    one_more = verdict_on(vocabulary, {**schema, "minProperties": 2}, is_strict=True)
    assert accepts(vocabulary, one_more, r'{"a\n": 1, "b": 2}')
    for text in (r'{"a\n": 1}', r'{"a\n": 1, "a\n": 2}', r'{"a\n": 1, "a\u000a": 2}', r'{"a\n": 1, "a\u000A": 2}'):
        assert not accepts(vocabulary, one_more, text), text
    two_more = verdict_on(vocabulary, {**schema, "minProperties": 3}, is_strict=True)
    assert f"'{PATH}.minProperties' of the tool 'get_rain'" in two_more.error
    assert "list the names in 'properties' and 'required', or ask for at most 2" in two_more.error
