"""Types of arguments by their schemas, and the values that texts become by them."""

from __future__ import annotations

import time

import pytest

from inferd.server.tools.answer_parser import AnswerParser
from inferd.server.tools.argument_schema import ArgumentSchema, value_of
from inferd.server.tools.parser_config import ParserConfig
from tests.unit.derived_templates import TEMPLATES
from tests.unit.round_trips import Template, format_of, turn_of
from tests.unit.test_tool_formats import format_of as builtin_format_of

DEFS = {
    "$defs": {
        "Place": {"type": "object", "properties": {"zip": {"type": "string"}}},
        "Color": {"enum": ["red", "5"]},
        "Again": {"$ref": "#/$defs/Again"},
    }
}
TYPES: dict[str, tuple[object, set[str]]] = {
    "a type": ({"type": "string"}, {"string"}),
    "types": ({"type": ["integer", "null"]}, {"integer", "null"}),
    "a union": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
    "a union with a schema that says nothing": ({"oneOf": [{"type": "string"}, {}]}, set()),
    "nullable": ({"type": "object", "nullable": True}, {"object", "null"}),
    "values": ({"enum": [1, "one", None]}, {"integer", "string", "null"}),
    "one value": ({"const": True}, {"boolean"}),
    "a reference": ({"$ref": "#/$defs/Place"}, {"object"}),
    "a reference in a union": ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "array"}]}, {"string", "array"}),
    "a reference and a description": ({"allOf": [{"$ref": "#/$defs/Place"}, {"description": "x"}]}, {"object"}),
    "two that both hold": ({"type": ["number", "string"], "allOf": [{"type": "integer"}]}, {"integer"}),
    "a reference to itself": ({"$ref": "#/$defs/Again"}, set()),
    "a reference to nothing": ({"$ref": "#/$defs/Else"}, set()),
    "no schema": (None, set()),
}


@pytest.mark.parametrize("name", TYPES)
def test_the_types_of_an_argument(name: str) -> None:
    schema, types = TYPES[name]
    parameters = {"properties": {"x": schema}, **DEFS}
    assert ArgumentSchema.of_tool(parameters).part("x").types == types


def test_the_schemas_of_parts() -> None:
    place = {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}
    parameters = {"properties": {"to": place, "via": {"type": "array", "items": place}}, **DEFS}
    assert ArgumentSchema.of_tool(parameters).part("to").part("zip").types == {"string"}
    assert ArgumentSchema.of_tool(parameters).part("via").items.part("zip").types == {"string"}
    assert ArgumentSchema.of_tool({"additionalProperties": {"type": "string"}}).part("any").types == {"string"}


def test_a_search_in_a_schema_is_bounded() -> None:
    wide: object = {"type": "string"}
    for _ in range(40):
        wide = {"anyOf": [wide] * 40}
    assert ArgumentSchema(wide).types == set()
    assert ArgumentSchema(wide).part("x").types == set()
    deep: object = {"type": "string"}
    for _ in range(400):
        deep = {"allOf": [deep]}
    assert ArgumentSchema(deep).types == set()
    assert ArgumentSchema({"anyOf": [{"const": i} for i in range(300)]}).types == {"integer"}
    assert ArgumentSchema({"type": "string", "enum": ["x"] * 100_000}).types == {"string"}


class Reads(dict[str, object]):
    """A schema that counts how often it is read."""

    num = 0

    def get(self, key: str, default: object = None) -> object:
        Reads.num += 1
        return super().get(key, default)


ENDLESS = {
    "a long reference": {"$ref": "#" + "/x" * 20_000},
    "a long list of values": {"enum": list(range(8_000))},
    "a wide reference to itself": {"anyOf": [Reads({"$ref": "#/$defs/e"})] * 1_500},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_many_arguments_of_a_large_schema_take_few_reads(name: str) -> None:
    """Each argument read the whole reference or list once for each schema that led there: seconds for one call."""
    parts = [Reads({"$ref": "#/$defs/e"}) for _ in range(60)]
    properties = {f"b{i}": {"allOf": parts[:4], "anyOf": [{"const": 1}] * 300} for i in range(1_000)}
    others = {"allOf": parts}
    parameters = {"properties": properties, "additionalProperties": others, "$defs": {"e": ENDLESS[name]}}
    schema, Reads.num = ArgumentSchema.of_tool(parameters), 0
    began = time.process_time()
    assert all(schema.part(f"a{i}").types == set() for i in range(1_000))
    assert schema.part("b0").types == {"integer"} and not all(schema.part(key).types for key in properties)
    assert Reads.num < 10_000 and time.process_time() - began < 1


def test_calls_in_tags_share_what_was_found_in_a_schema() -> None:
    parts = [Reads({"$ref": "#/$defs/e"}) for _ in range(60)]
    parameters = {"additionalProperties": {"allOf": parts}, "$defs": {"e": Reads({"type": "integer"})}}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    written = "".join(f"<parameter=a{i}>\n1\n</parameter>\n" for i in range(20))
    Reads.num = 0
    parser = AnswerParser(ParserConfig(builtin_format_of("qwen3_coder"), with_calls=True, tools=(tool,)))
    text = f"<tool_call>\n<function=go>\n{written}</function>\n</tool_call>\n" * 5
    read = turn_of([*parser.feed(text), *parser.finish()])
    assert read.calls == ({"name": "go", "arguments": {f"a{i}": 1 for i in range(20)}},) * 5
    assert Reads.num < 2_000


@pytest.mark.parametrize(
    ("types", "text", "value"),
    [
        ("string", "5", "5"),
        ("string", '"q"', '"q"'),
        ("string null", "null", None),
        ("string null", "5", "5"),
        ("string integer", "5", 5),
        ("string integer", "007", "007"),
        ("string number", "1e3", "1e3"),
        ("string boolean", "True", True),
        ("string object", '{"a": 1}', {"a": 1}),
        ("string array", "[1", "[1"),
        ("integer", "007", 7),
        ("integer", "3.0", 3),
        ("integer", "3.5", "3.5"),
        ("number", "3.0", 3.0),
        ("number", "1e999", "1e999"),
        ("integer null", "None", None),
        ("boolean", "FALSE", False),
        ("object", "{'a': True}", {"a": True}),
        ("array", "{}", "{}"),
        ("", "5", "5"),
        ("object", '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ("object string", '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
    ],
)
def test_what_a_text_becomes(types: str, text: str, value: object) -> None:
    found = value_of(text, frozenset(types.split()))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("name", ["tags of arguments", "pairs of key and value", "tags with types"])
def test_references_in_a_tool_tell_the_types_of_its_arguments(name: str) -> None:
    """Many clients write the types of their tools as references."""
    template = Template(TEMPLATES[name])
    found = format_of(template, template.support())
    properties = {"to": {"$ref": "#/$defs/Place"}, "color": {"$ref": "#/$defs/Color"}, "free": {}}
    tool = {"type": "function", "function": {"name": "go", "parameters": {"properties": properties, **DEFS}}}
    arguments = {"to": {"zip": "5"}, "color": "5", "free": "x"}
    turn = {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "id": "a", "function": {"name": "go", "arguments": arguments}}
    ]}  # fmt: skip
    asked = [{"role": "user", "content": "x"}]
    text, prompt = template.render([*asked, turn], [tool], is_prompt=False), template.render(asked, [tool])
    assert text is not None and prompt is not None and text.startswith(prompt)
    parser = AnswerParser(ParserConfig(found, with_calls=True, tools=(tool,)))
    read = turn_of([*parser.feed(text.removeprefix(prompt)), *parser.finish()])
    assert read.calls == ({"name": "go", "arguments": arguments},)
