"""Fields that constrain an answer: read from the wire, bounded, and refused by the path of the wrong part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.grammar_check import MAX_GRAMMAR_BYTES
from inferd.engine.grammar.compiler import compile_grammar, normal_form
from inferd.engine.grammar.vocabulary import load_vocabulary
from inferd.server.generate.answer_rules import answer_language
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.request_model import read
from inferd.server.structured.language import Language
from inferd.server.structured.schema import MAX_ENUM_ENTRIES, MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH, read_schema

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
    return None if answer is None else normal_form(answer.language.text()).text


def refused(**body: Any) -> tuple[str, str | None, str]:
    with pytest.raises(RequestError) as caught:
        grammar_of(**body)
    return caught.value.code, caught.value.param, caught.value.message


def accepts(vocabulary: LLTokenizer, grammar: str | None, text: str) -> bool:
    """Whether a grammar accepts the tokens of a text and may end behind them."""
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
         "structured_outputs.json.uniqueItems", "cannot be enforced. Leave it out."),
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
    """A schema of so many levels; each object in an object's properties adds two."""
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
    compile_grammar(vocabulary, normal_form(read_schema(deepest, "s", is_strict=True).text()).text)
    assert "nested more than 64 levels deep" in reason(nested(MAX_SCHEMA_DEPTH + 1))
    assert "levels deep" in reason(nested(100_001)), "deeper than any stack"

    padding = {"description": "x" * (MAX_SCHEMA_CHARS - len('{"description": ""}'))}
    read_schema(padding, "s", is_strict=True)
    assert "more than 65536 characters" in reason({"description": padding["description"] + "x"})

    most = {"anyOf": [{"enum": list(range(MAX_ENUM_ENTRIES - 1))}, {"enum": ["last"]}]}
    compile_grammar(vocabulary, normal_form(read_schema(most, "s", is_strict=True).text()).text)
    assert "4097 entries, but at most 4096" in reason({"anyOf": [*most["anyOf"], {"enum": [1]}]})
    assert "a number that is too large" in reason({"const": 10**5_000})


def test_a_callers_options_for_the_compiler_are_not_taken(vocabulary: LLTokenizer) -> None:
    options = {"whitespace_flexible": True, "lenient": True}
    grammar = normal_form(read_schema({"type": "object", "x-guidance": options}, "s", is_strict=True).text()).text
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
    grammar = normal_form(
        read_schema({"items": {"type": "number", **bounds}, "type": "array"}, "s", is_strict=True).text()
    ).text
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
        (tagged({"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</tool_call>\n"}),
         ["<f>any</tool_call>\n"], ["<f>any</tool_call>"]),
        (tagged({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "at_least_one": True}),
         ["<f=a>{}</f>", "x<f=a>{}</f>y"], ["x", "<f=a>"]),
        (tagged({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "stop_after_first": True}),
         ["x<f=a>{}</f>", "x"], ["x<f=a>{}</f>y"]),
        (tagged({"type": "triggered_tags", "triggers": ["<tool_call>"],
                 "tags": [{"begin": "<tool_call>", "content": OBJECT, "end": "</tool_call>"}]}),
         ["x", "x<tool_call>{}</tool_call>y"], ["x<tool_call>1</tool_call>"]),
        (tagged({"type": "triggered_tags", "triggers": ["<tool_call>\n"],
                 "tags": [{"begin": "<tool_call>\n", "content": OBJECT, "end": "</tool_call>"}]}),
         ["x", "x<tool_call>\n{}</tool_call>y"], ["x<tool_call>\n1</tool_call>"]),
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


# -- what small bodies become ------------------------------------------------------------------------------------------

ANY = {"type": "any_text"}


def nested_tags(kind: str, levels: int, *, num_triggers: int = 2) -> dict[str, Any]:
    """Nested tags. Each begins with every one of its triggers, so that it is referred to once for each."""
    form: dict[str, Any] = {"type": "regex", "pattern": "[a-z]{1,9}"}
    for _ in range(levels):
        tag = {"begin": "<" * num_triggers, "content": form, "end": ">"}
        if kind == "triggered_tags":
            triggers = ["<" * i for i in range(1, num_triggers + 1)]
            form = {"type": kind, "triggers": triggers, "tags": [tag]}
        elif kind == "tags_with_separator":
            form = {"type": kind, "tags": [tag], "separator": ", "}
        elif kind == "tag":
            form = {"type": kind, **tag}
        else:
            form = {"type": kind, "elements": [form, ANY]}
    return tagged(form)


@pytest.mark.parametrize("kind", ["triggered_tags", "tags_with_separator", "tag", "sequence", "or"])
def test_a_grammar_is_as_long_as_what_it_is_made_of(kind: str) -> None:
    lengths = []
    for levels in (4, 8, 16):
        grammar = grammar_of(**nested_tags(kind, levels))
        assert grammar is not None
        lengths.append(len(grammar))
    assert lengths[2] - lengths[1] == pytest.approx(2 * (lengths[1] - lengths[0]), rel=0.05), "a level adds a level"
    assert lengths[2] < 16 * 300


def test_a_repeated_trigger_is_one(vocabulary: LLTokenizer) -> None:
    once, twice = (
        grammar_of(**tagged({"type": "triggered_tags", "triggers": ["<f"] * num, "tags": [TAG]})) for num in (1, 200)
    )
    assert once == twice


@pytest.mark.parametrize(
    "form",
    [
        nested_tags("triggered_tags", 1, num_triggers=250),
        nested_tags("triggered_tags", 16, num_triggers=60),
        tagged(
            {
                "type": "triggered_tags",
                "triggers": ["a" * i for i in range(1, 200)],
                "tags": [{"begin": "a" * 200 + str(i), "content": ANY, "end": "z"} for i in range(200)],
            }
        ),
        tagged({"type": "sequence", "elements": [{"type": "const_string", "value": "x" * 65_536}] * 5}),
        tagged({"type": "sequence", "elements": [{"type": "json_schema", "json_schema": {"title": "x" * 60_000}}] * 5}),
    ],
    ids=["250 triggers", "60 triggers, nested", "199 triggers of 200 tags", "texts", "schemas"],
)
def test_what_would_be_a_long_grammar_is_refused_before_it_is_built(
    form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = len(json.dumps(form))
    built: list[int] = []
    made = Language.__init__

    def counted(self: Language, expression: str, *others: Any, **named: Any) -> None:
        built.append(len(expression))
        made(self, expression, *others, **named)

    monkeypatch.setattr(Language, "__init__", counted)
    refusal, grammar = None, None
    try:
        grammar = grammar_of(**form)
    except RequestError as error:
        refusal = error
    if refusal is not None:
        assert (refusal.code, refusal.param) == ("invalid_value", "response_format")
        assert str(MAX_GRAMMAR_BYTES) in refusal.message
    assert grammar is None or len(grammar) < 3 * MAX_GRAMMAR_BYTES
    assert sum(built) < 40 * (body + MAX_GRAMMAR_BYTES)


def test_bounds_of_a_structural_tag() -> None:
    many = [{"begin": f"<{i:02}", "content": ANY, "end": "</>"} for i in range(100)]
    triggers = ["<", *(f"<{i}" for i in range(10))]
    assert grammar_of(**tagged({"type": "triggered_tags", "triggers": triggers, "tags": many}))
    wide = [{**tag, "begin": "<" * 400 + str(i)} for i, tag in enumerate(many)]
    triggers = ["<" * i for i in range(1, 60)]
    code, param, message = refused(**tagged({"type": "triggered_tags", "triggers": triggers, "tags": wide}))
    assert (code, param) == ("invalid_value", "response_format")
    assert "at least 262" in message and f"at most {MAX_GRAMMAR_BYTES} are allowed" in message
    long = tagged({"type": "sequence", "elements": [{"type": "const_string", "value": "x" * 60_000}] * 5})
    assert "the structural tag has more than 262144 characters of JSON" in refused(**long)[2]


# -- expressions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regex", "texts", "others"),
    [
        (r"\d{2}", ["12"], ["1\u0661", "\u0967\u0968", "\U0001fbf0\U0001fbf1"]),
        (r"\w+", ["aZ_9"], ["\u00e9", "\u4e2d", "\u0661"]),
        (r"a\sb", ["a b", "a\tb", "a\nb"], ["a\u2003b", "a\u00a0b", "a\u0085b"]),
        (r"\D", ["a", "\u0661"], ["1"]),
        (r"\W", ["\u00e9", "-"], ["a", "_", "5"]),
        (r"\S", ["\u2003", "a"], [" ", "\n"]),
        (r"[\d\-x]+", ["1-x"], ["\u0661", "y"]),
        (r"[^\d]", ["a", "\u0661"], ["1"]),
        (r"[^\W\d]", ["a", "_"], ["1", "\u00e9", "-"]),
        (r"[\S]", ["\u2003"], [" "]),
        (r"\\d", [r"\d"], ["1"]),
        (r"\\\d", ["\\1"], [r"\d", "\\\u0661"]),
        (r"\p{Nd}", ["1", "\u0661"], ["a"]),
        (r"[\d/]+\/", ["1/2/"], ["1"]),
        ("(?x) \\s a \\d", [" a1"], ["a1", " a\u0661"]),
    ],
)  # fmt: skip
def test_classes_of_expressions_are_ascii(
    vocabulary: LLTokenizer, regex: str, texts: list[str], others: list[str]
) -> None:
    for body in (
        {"regex": regex},
        {"structured_outputs": {"regex": regex}},
        tagged({"type": "regex", "pattern": regex}),
    ):
        grammar = grammar_of(**body)
        assert [text for text in texts if not accepts(vocabulary, grammar, text)] == []
        assert [text for text in others if accepts(vocabulary, grammar, text)] == []


def test_choices_are_texts_and_not_expressions(vocabulary: LLTokenizer) -> None:
    grammar = grammar_of(structured_outputs={"choice": [r"\d", r"\\s", "/"]})
    assert all(accepts(vocabulary, grammar, text) for text in (r"\d", r"\\s", "/"))
    assert not any(accepts(vocabulary, grammar, text) for text in ("1", " ", "\\ "))
