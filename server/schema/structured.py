"""The wire kinds that say what an answer may be: `response_format`, `structured_outputs`, and other servers' spellings.

Each is read into an `AnswerFormat`; free text is None. What a structural tag may name is known only with the model, so
it is checked later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from inferd.server.errors import table as errors
from inferd.server.schema import strict_json
from inferd.server.schema.kinds import Array, Boolean, Choice, Schema, Text, check_properties, object_schema
from inferd.server.structured.language import Language, json_value, lark, one_of, pattern
from inferd.server.structured.schema import MAX_ENUM_ENTRIES, MAX_SCHEMA_CHARS, read_schema

MAX_EXPRESSION_LENGTH = 65_536
"""Characters of a regular expression, a grammar, or all of a choice's texts."""

_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_EXPRESSION = Text(1, MAX_EXPRESSION_LENGTH)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What one field asks of the answer; `language`, or `tags` to be read with the model's special tokens."""

    param: str
    """Where it was asked, to name in errors that are found later."""
    language: Language | None = None
    tags: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """OpenAI's field; "text" is read as None."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> AnswerFormat | None:
        if not isinstance(value, dict):
            raise errors.invalid_type(where, self.name, value)
        if value.get("type") is None:
            raise errors.missing(f"{where}.type")
        kind = Choice(_FORMATS).read(value["type"], f"{where}.type")
        if kind == "structural_tag":
            return AnswerFormat(where, tags=value)
        if kind == "json_schema":
            given = check_properties(value, where, ("type", "json_schema"), ())
            return named_schema(given["json_schema"], f"{where}.json_schema")
        check_properties(value, where, ("type",), ())
        return None if kind == "text" else AnswerFormat(where, json_value({"type": "object"}))

    def schema(self) -> Schema:
        named = object_schema(
            {
                "name": {"type": "string", "pattern": f"^{_SCHEMA_NAME.pattern}$"},
                "description": {"type": "string"},
                "schema": {"type": ["object", "boolean"]},
                "strict": {"type": "boolean"},
            },
            ("name", "schema"),
        )
        plain = object_schema({"type": {"enum": ["text", "json_object"]}}, ("type",))
        tagged = {"type": "object", "properties": {"type": {"const": "structural_tag"}}, "required": ["type"]}
        return {
            "anyOf": [
                plain,
                object_schema({"type": {"const": "json_schema"}, "json_schema": named}, ("type", "json_schema")),
                tagged,
            ]
        }


def named_schema(value: object, where: str) -> AnswerFormat:
    """{name, schema, description, strict}, of which the first two must be. Raises `RequestError`."""
    given = check_properties(value, where, ("name", "schema"), ("description", "strict"))
    name = Text().read(given["name"], f"{where}.name")
    if not _SCHEMA_NAME.fullmatch(name):
        raise errors.invalid_value(f"{where}.name", name, "Expected 1 to 64 letters, digits, '_' or '-'.")
    if given.get("description") is not None:
        Text().read(given["description"], f"{where}.description")
    is_strict = given.get("strict") is not None and Boolean().read(given["strict"], f"{where}.strict")
    return AnswerFormat(f"{where}.schema", read_schema(given["schema"], f"{where}.schema", is_strict=is_strict))


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """vLLM's field: exactly one way to say what the answer may be."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> AnswerFormat:
        ways = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
        given = {key: way for key, way in check_properties(value, where, (), ways).items() if way is not None}
        if len(given) != 1:
            rule = f"Expected exactly one of {', '.join(ways)}"
            raise errors.invalid_value(where, ", ".join(given) or "{}", f"{rule}.")
        ((way, asked),) = given.items()
        path = f"{where}.{way}"
        if way == "structural_tag":
            return AnswerFormat(path, tags=_object(asked, path))
        return AnswerFormat(path, _language(way, asked, path))

    def schema(self) -> Schema:
        text = _EXPRESSION.schema()
        return object_schema(
            {
                "json": {"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]},
                "json_object": {"const": True},
                "regex": text,
                "choice": Array(_EXPRESSION, 1, MAX_ENUM_ENTRIES).schema(),
                "grammar": text,
                "structural_tag": {"anyOf": [{"type": "object"}, {"type": "string"}]},
            }
        ) | {"minProperties": 1, "maxProperties": 1}


@dataclass(frozen=True, slots=True)
class Expression:
    """A regular expression or a grammar as a field of its own, as SGLang has them."""

    way: str
    name: str = "a string"

    def accepts(self, value: object) -> bool:
        return isinstance(value, str)

    def read(self, value: object, where: str) -> AnswerFormat:
        return AnswerFormat(where, _language(self.way, value, where))

    def schema(self) -> Schema:
        return _EXPRESSION.schema()


def _language(way: str, asked: object, where: str) -> Language:
    match way:
        case "json":
            schema = asked if isinstance(asked, bool) else _object(asked, where)
            return read_schema(schema, where, is_strict=True)
        case "json_object":
            if asked is not True:
                raise errors.invalid_value(where, asked, "Expected true, or no such field.")
            return json_value({"type": "object"})
        case "regex":
            return pattern(_EXPRESSION.read(asked, where))
        case "choice":
            return _choice(asked, where)
    grammar = _EXPRESSION.read(asked, where)
    if grammar.lstrip().startswith("{"):
        raise errors.invalid_value(where, grammar, "Expected a grammar in Lark or in GBNF.")
    return lark(grammar)


def _choice(value: object, where: str) -> Language:
    texts = [str(text) for text in Array(_EXPRESSION, 1, MAX_ENUM_ENTRIES).read(value, where)]
    length = sum(map(len, texts))
    if length > MAX_EXPRESSION_LENGTH:
        raise errors.string_too_long(where, MAX_EXPRESSION_LENGTH, length)
    return one_of(texts)


def _object(value: object, where: str) -> Mapping[str, object]:
    """An object, or one written as a string of JSON."""
    if isinstance(value, str):
        try:
            value = strict_json.parse(Text(1, 4 * MAX_SCHEMA_CHARS).read(value, where).encode())
        except ValueError as error:
            raise errors.invalid_value(where, value, "Expected an object, or a string of JSON.") from error
    if not isinstance(value, dict):
        raise errors.invalid_type(where, "an object", value)
    return value
