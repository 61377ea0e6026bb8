"""Types of arguments by their schemas, and the values that texts become by them."""

from __future__ import annotations

import pytest

from inferd.server.tools.answer_parser import AnswerParser
from inferd.server.tools.argument_schema import ArgumentSchema, value_of
from inferd.server.tools.parser_config import ParserConfig
from tests.unit.derived_templates import TEMPLATES
from tests.unit.round_trips import Template, format_of, turn_of

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
    assert ArgumentSchema.of(parameters, "x").types == types


def test_the_schemas_of_parts() -> None:
    place = {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}
    parameters = {"properties": {"to": place, "via": {"type": "array", "items": place}}, **DEFS}
    assert ArgumentSchema.of(parameters, "to").part("zip").types == {"string"}
    assert ArgumentSchema.of(parameters, "via").items.part("zip").types == {"string"}
    assert ArgumentSchema.of({"additionalProperties": {"type": "string"}}, "any").types == {"string"}


def test_a_search_in_a_schema_is_bounded() -> None:
    wide: object = {"type": "string"}
    for _ in range(40):
        wide = {"anyOf": [wide] * 40}
    assert ArgumentSchema(wide).types == set()
    assert ArgumentSchema(wide).part("x").types == set()


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
