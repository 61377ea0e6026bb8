"""What the fields say an answer may be: read from the wire, bounded, and refused by the path of what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from inferd.engine.api.errors import RequestError
from inferd.engine.grammar.compiler import compile_grammar, normal_form
from inferd.engine.grammar.vocabulary import load_vocabulary
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.fields import read
from inferd.server.structured.formats import answer_language
from inferd.server.structured.schema import MAX_ENUM_ENTRIES, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, read_schema

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
TOKENS: Mapping[str, int] = {"<|im_end|>": 2, "<tool_call>": 3, "</tool_call>": 4}
HI = {"messages": [{"role": "user", "content": "hi"}]}
INTEGER = {"type": "integer"}


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return load_vocabulary(MODEL_PATH, 3_072)


def grammar_of(**body: Any) -> str | None:
    answer = answer_language(read(ChatRequest, {**HI, **body}), TOKENS)
    completion = answer_language(read(CompletionRequest, {"prompt": "x", **body}), TOKENS)
    assert answer == completion, "both APIs take the same fields"
    return None if answer is None else normal_form(answer.language.text())


def refused(**body: Any) -> tuple[str, str | None, str]:
    with pytest.raises(RequestError) as caught:
        grammar_of(**body)
    return caught.value.code, caught.value.param, caught.value.message


def accepts(vocabulary: LLTokenizer, grammar: str | None, text: str) -> bool:
    """Whether a grammar takes a text, written as the tokenizer writes it, and may end behind it."""
    assert grammar is not None
    matcher = compile_grammar(vocabulary, grammar)
    token_ids = vocabulary.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("body", "texts", "others"),
    [
        ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1, {}]}'], ["[]", "1"]),
        ({"response_format": json_schema(INTEGER)}, ["7"], ["7.5", '"7"']),
        ({"response_format": json_schema({**INTEGER, "not": {"const": 7}})}, ["7"], ["x"]),
        ({"structured_outputs": {"json": INTEGER}}, ["7"], ["x"]),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, ["7"], ["x"]),
        ({"structured_outputs": {"json": True}}, ["7", "{}"], ["x"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["7"]),
        ({"structured_outputs": {"regex": "a|bc"}}, ["a", "bc"], ["ac"]),
        ({"structured_outputs": {"choice": ["a.b", "c|d", "<|im_end|"]}}, ["a.b", "c|d"], ["axb", "c"]),
        ({"structured_outputs": {"grammar": 'start: "a" /[0-9]/'}}, ["a1"], ["a"]),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]'}}, ["a1"], ["a"]),
        ({"structured_outputs": {"regex": "a", "choice": None}}, ["a"], ["b"]),
        ({"regex": "a+"}, ["aa"], ["b"]),
        ({"ebnf": 'root ::= "a"'}, ["a"], ["b"]),
    ],
)  # fmt: skip
def test_fields_are_read(vocabulary: LLTokenizer, body: dict[str, Any], texts: list[str], others: list[str]) -> None:
    grammar = grammar_of(**body)
    assert [text for text in texts if not accepts(vocabulary, grammar, text)] == []
    assert [text for text in others if accepts(vocabulary, grammar, text)] == []


@pytest.mark.parametrize(
    "body", [{}, {"response_format": {"type": "text"}}, {"regex": None, "structured_outputs": None}]
)
def test_free_text(body: dict[str, Any]) -> None:
    assert grammar_of(**body) is None


@pytest.mark.parametrize(
    ("body", "code", "param", "words"),
    [
        ({"response_format": {}}, "missing_required_parameter", "response_format.type", ""),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type", "'json_schema'"),
        ({"response_format": {"type": "text", "x": 1}}, "unknown_parameter", "response_format.x", ""),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema", ""),
        ({"response_format": json_schema(INTEGER, name=None)}, "missing_required_parameter",
         "response_format.json_schema.name", ""),
        ({"response_format": json_schema(INTEGER, name="a b")}, "invalid_value", "response_format.json_schema.name",
         "1 to 64 letters"),
        ({"response_format": json_schema(INTEGER, name="x" * 65)}, "invalid_value", "response_format.json_schema.name",
         "1 to 64 letters"),
        ({"response_format": json_schema(None)}, "missing_required_parameter", "response_format.json_schema.schema",
         ""),
        ({"response_format": json_schema([])}, "invalid_type", "response_format.json_schema.schema", "an object"),
        ({"response_format": json_schema(INTEGER, strict="yes")}, "invalid_type", "response_format.json_schema.strict",
         "a boolean"),
        ({"response_format": json_schema({"properties": {"a": {"items": {"not": {}}}}}, strict=True)},
         "unsupported_value", "response_format.json_schema.schema.properties.a.items.not", "'not' cannot be enforced"),
        ({"response_format": json_schema({"anyOf": [INTEGER, {"format": "regex"}]}, strict=True)},
         "unsupported_value", "response_format.json_schema.schema.anyOf[1].format", "date-time, time"),
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "unsupported_value",
         "structured_outputs.json.uniqueItems", "'strict', false leaves it to the model"),
        ({"structured_outputs": {}}, "invalid_value", "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_value", "structured_outputs", "exactly one"),
        ({"structured_outputs": {"jsn": {}}}, "unknown_parameter", "structured_outputs.jsn", ""),
        ({"structured_outputs": {"json": "{"}}, "invalid_value", "structured_outputs.json", "a string of JSON"),
        ({"structured_outputs": {"json": "[]"}}, "invalid_type", "structured_outputs.json", "an object"),
        ({"structured_outputs": {"json_object": False}}, "invalid_value", "structured_outputs.json_object", "true"),
        ({"structured_outputs": {"choice": []}}, "empty_array", "structured_outputs.choice", ""),
        ({"structured_outputs": {"choice": [""]}}, "empty_string", "structured_outputs.choice[0]", ""),
        ({"structured_outputs": {"choice": ["a"] * 4_097}}, "array_above_max_length", "structured_outputs.choice",
         "4096"),
        ({"structured_outputs": {"choice": ["a" * 60_000] * 2}}, "string_above_max_length",
         "structured_outputs.choice", "65536"),
        ({"structured_outputs": {"regex": "a" * 65_537}}, "string_above_max_length", "structured_outputs.regex", ""),
        ({"structured_outputs": {"grammar": '{"grammars": []}'}}, "invalid_value", "structured_outputs.grammar",
         "Lark"),
        ({"regex": 3}, "invalid_type", "regex", "a string"),
        ({"regex": "a", "ebnf": "b"}, "invalid_value", "ebnf", "Only one of 'regex' and 'ebnf'"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "invalid_value",
         "structured_outputs", "Only one of"),
        ({"guided_json": {}}, "unsupported_parameter", "guided_json", "Use 'structured_outputs' with 'json' instead."),
        ({"guided_choice": ["a"]}, "unsupported_parameter", "guided_choice", "with 'choice'"),
        ({"guided_regex": "a"}, "unsupported_parameter", "guided_regex", "with 'regex'"),
        ({"guided_grammar": "a"}, "unsupported_parameter", "guided_grammar", "with 'grammar'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_its_path(body: dict[str, Any], code: str, param: str, words: str) -> None:
    found = refused(**body)
    assert found[:2] == (code, param)
    assert words in found[2] and len(found[2]) < 1_000


# -- schemas -----------------------------------------------------------------------------------------------------------


def nested(levels: int) -> dict[str, Any]:
    """JSON of so many levels, each an object in an object's properties being two."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels // 2):
        schema = {"properties": {"a": schema}}
    return schema if levels % 2 else schema["properties"]


def reason(schema: Any, *, is_strict: bool = True) -> str:
    with pytest.raises(RequestError) as caught:
        read_schema(schema, "s", is_strict=is_strict)
    return caught.value.message


def test_bounds_of_a_schema(vocabulary: LLTokenizer) -> None:
    deepest = nested(MAX_SCHEMA_DEPTH - 1)
    compile_grammar(vocabulary, read_schema(deepest, "s", is_strict=True).text())
    assert f"nested {MAX_SCHEMA_DEPTH + 1} levels deep, and at most 64" in reason(nested(MAX_SCHEMA_DEPTH + 1))
    assert "levels deep" in reason(nested(100_001)), "deeper than any stack"

    padding = {"description": "x" * (MAX_SCHEMA_BYTES - len('{"description": ""}'))}
    read_schema(padding, "s", is_strict=True)
    assert "65537 bytes" in reason({"description": padding["description"] + "x"})

    most = {"anyOf": [{"enum": list(range(MAX_ENUM_ENTRIES - 1))}, {"enum": ["last"]}]}
    compile_grammar(vocabulary, read_schema(most, "s", is_strict=True).text())
    assert "4097 entries, and at most 4096" in reason({"anyOf": [*most["anyOf"], {"enum": [1]}]})
    assert "must be" in reason({"enum": 3}) or "expected an array" in reason({"enum": 3})
    assert "a number that is too long" in reason({"const": 10**5_000})


def test_a_callers_options_for_the_compiler_are_not_taken(vocabulary: LLTokenizer) -> None:
    options = {"whitespace_flexible": True, "lenient": True}
    grammar = read_schema({"type": "object", "x-guidance": options}, "s", is_strict=True).text()
    assert accepts(vocabulary, grammar, '{"a": 1}') and not accepts(vocabulary, grammar, '{"a":     1}')


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"exclusiveMinimum": 10, "maximum": 10.5}, ["10.25", "10.5"], ["10", "10.0", "10.51"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.25"], ["0", "-0", "0.5"]),
        ({"minimum": -10.5, "exclusiveMaximum": -10}, ["-10.5", "-10.25"], ["-10", "-10.0"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.25"], ["0", "-0"]),
        ({"exclusiveMinimum": 10, "maximum": 12}, ["10.5", "12"], ["10"]),
    ],
)  # fmt: skip
def test_exclusive_bounds_exclude(
    vocabulary: LLTokenizer, bounds: dict[str, float], inside: list[str], outside: list[str]
) -> None:
    grammar = read_schema({"items": {"type": "number", **bounds}, "type": "array"}, "s", is_strict=True).text()
    assert [text for text in inside if not accepts(vocabulary, grammar, f"[{text}]")] == []
    assert [text for text in outside if accepts(vocabulary, grammar, f"[{text}]")] == []


# -- structural tags ---------------------------------------------------------------------------------------------------

OBJECT = {"type": "json_schema", "json_schema": {"type": "object"}}
TAG = {"begin": "<f=a>", "content": OBJECT, "end": "</f>"}


def tagged(form: Any) -> dict[str, Any]:
    return {"response_format": {"type": "structural_tag", "format": form}}


@pytest.mark.parametrize(
    ("body", "texts", "others"),
    [
        (
            {"structured_outputs": {"structural_tag": {
                "triggers": ["<f="],
                "structures": [{"begin": "<f=a>", "schema": INTEGER, "end": "</f>"},
                               {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"}],
            }}},
            ["", "free text", "x <f=a>1</f> y <f=b>true</f>"], ["<f=a>true</f>", "<f=c>1</f>", "<f=a>1"],
        ),
        (tagged({"type": "const_string", "value": "a<tool_call>"}), ["a<tool_call>"], ["a"]),
        (tagged({"type": "regex", "pattern": "a+"}), ["aa"], ["b"]),
        (tagged({"type": "grammar", "grammar": 'root ::= "a"'}), ["a"], ["b"]),
        (tagged({"type": "any_text"}), ["", "any"], []),
        (tagged({"type": "sequence", "elements": [{"type": "regex", "pattern": "a"}, OBJECT]}), ["a{}"], ["a", "{}"]),
        (tagged({"type": "or", "elements": [{"type": "regex", "pattern": "a"}, OBJECT]}), ["a", "{}"], ["a{}"]),
        (tagged({"type": "tag", **TAG}), ["<f=a>{}</f>"], ["{}", "<f=a>{}"]),
        (tagged({"type": "tag", "begin": "<tool_call>", "content": {"type": "any_text"}, "end": "</tool_call>"}),
         ["<tool_call>any</tool_call>"], ["<tool_call>any", "any</tool_call>"]),
        (tagged({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "at_least_one": True}),
         ["<f=a>{}</f>", "x<f=a>{}</f>y"], ["x", "<f=a>"]),
        (tagged({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "stop_after_first": True}),
         ["x<f=a>{}</f>", "x"], ["x<f=a>{}</f>y"]),
        (tagged({"type": "triggered_tags", "triggers": ["<tool_call>"],
                 "tags": [{"begin": "<tool_call>", "content": OBJECT, "end": "</tool_call>"}]}),
         ["x", "x<tool_call>{}</tool_call>y"], ["x<tool_call>1</tool_call>"]),
        (tagged({"type": "tags_with_separator", "tags": [TAG], "separator": ", ", "at_least_one": True}),
         ["<f=a>{}</f>", "<f=a>{}</f>, <f=a>{}</f>"], ["", "<f=a>{}</f>,"]),
        (tagged({"type": "tags_with_separator", "tags": [TAG], "separator": ", "}), ["", "<f=a>{}</f>"], ["x"]),
    ],
)  # fmt: skip
def test_structural_tags(vocabulary: LLTokenizer, body: dict[str, Any], texts: list[str], others: list[str]) -> None:
    grammar = grammar_of(**body)
    assert [text for text in texts if not accepts(vocabulary, grammar, text)] == []
    assert [text for text in others if accepts(vocabulary, grammar, text)] == []


def deep_tag(levels: int) -> dict[str, Any]:
    form: dict[str, Any] = {"type": "any_text"}
    for _ in range(levels):
        form = {"type": "sequence", "elements": [form]}
    return form


@pytest.mark.parametrize(
    ("form", "code", "param"),
    [
        (3, "invalid_type", "response_format.format"),
        ({}, "missing_required_parameter", "response_format.format.type"),
        ({"type": "poem"}, "invalid_value", "response_format.format.type"),
        ({"type": "regex"}, "missing_required_parameter", "response_format.format.pattern"),
        ({"type": "sequence", "elements": []}, "empty_array", "response_format.format.elements"),
        ({"type": "sequence", "elements": [{"type": "json_schema", "json_schema": {"not": {}}}]}, "unsupported_value",
         "response_format.format.elements[0].json_schema.not"),
        ({"type": "triggered_tags", "triggers": ["<g"], "tags": [TAG]}, "invalid_value",
         "response_format.format.triggers"),
        (deep_tag(17), "invalid_value", "response_format.format" + ".elements[0]" * 17),
        (deep_tag(500), "invalid_value", "response_format.format" + ".elements[0]" * 17),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_tag_is_refused_by_its_path(form: Any, code: str, param: str) -> None:
    assert refused(**tagged(form))[:2] == (code, param)
