"""The fields that say what an answer may be: `response_format`, `structured_outputs`, and other servers' spellings.

Each is read into an `AnswerFormat`; free text is None. What a structural tag may name is known only with the model, so
it is checked later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationInfo, WithJsonSchema

from inferd.server.errors import messages as errors
from inferd.server.errors import validation
from inferd.server.schema import strict_json
from inferd.server.schema.request_model import Kind, Part, Row
from inferd.server.schema.values import Converted, Flag, JsonObject, Many, Matching, Text, union_of
from inferd.server.structured.language import Language, json_value, lark, one_of, pattern
from inferd.server.structured.schema import MAX_ENUM_ENTRIES, MAX_SCHEMA_CHARS, OR_NOT_STRICT, read_schema

MAX_EXPRESSION_LENGTH = 65_536
"""Characters of a regular expression, a grammar, or all of a choice's texts."""

Expression = Annotated[Text, Field(min_length=1, max_length=MAX_EXPRESSION_LENGTH)]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format that one field asks for: `language`, or `tags` that are read with the model's special tokens."""

    param: str
    """Path of the field, for errors that are found later."""
    language: Language | None = None
    tags: Mapping[str, object] | None = None


# --- response_format -------------------------------------------------------------------------------------------------


class PlainFormat(Part):
    type: Literal["text", "json_object"]

    refused = {"schema": "Only the type 'json_schema' has a schema."}  # noqa: RUF012


class NamedSchema(Part):
    """OpenAI's object around a JSON schema."""

    name: Annotated[Text, Matching("[A-Za-z0-9_-]{1,64}", "Expected 1 to 64 letters, digits, '_' or '-'.")]
    description: Text | None = None
    strict: Flag = False
    value: Annotated[object, WithJsonSchema({"type": ["object", "boolean"]})] = Field(alias="schema")

    kinds: ClassVar[Mapping[str, Kind]] = {"name": "hint", "description": "hint"}


class _SchemaFormat(Part):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    refused = dict.fromkeys(NamedSchema.names, "Put it into 'json_schema'.")


FORMATS: Mapping[str, Row] = {
    "text": Row("enforced", "The answer is any text."),
    "json_object": Row("enforced", "The answer is a JSON object."),
    "json_schema": Row("enforced", "The answer follows the schema."),
    "structural_tag": Row("enforced", "The parts of the answer between its tags follow their schemas."),
}
"""Type of a `response_format` -> what is done with it."""

_TAGGED = {"type": "object", "properties": {"type": {"const": "structural_tag"}}, "required": ["type"]}
_Format: Any = union_of(
    FORMATS,
    {
        "text": PlainFormat,
        "json_object": PlainFormat,
        "json_schema": _SchemaFormat,
        "structural_tag": Annotated[JsonObject, WithJsonSchema(_TAGGED)],
    },
)


def format_of(given: PlainFormat | NamedSchema, where: str) -> AnswerFormat | None:
    """Raises `RequestError` for a schema that cannot be enforced."""
    if isinstance(given, NamedSchema):
        path = f"{where}.schema"
        language = read_schema(given.value, path, is_strict=given.strict, way_out=OR_NOT_STRICT)
        return AnswerFormat(path, language)
    return None if given.type == "text" else AnswerFormat(where, json_value({"type": "object"}))


def _response_format(given: PlainFormat | _SchemaFormat | JsonObject, where: str) -> AnswerFormat | None:
    if isinstance(given, dict):
        return AnswerFormat(where, tags=given)
    if isinstance(given, _SchemaFormat):
        return format_of(given.json_schema, f"{where}.json_schema")
    return format_of(given, where)


ResponseFormat = Annotated[AnswerFormat | None, Converted(_Format, _response_format)]
"""OpenAI's field."""


# --- structured_outputs and its parts as fields of their own ---------------------------------------------------------


_ObjectOrText = {"anyOf": [{"type": "object"}, {"type": "string"}]}
_SchemaOrText = {"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]}


class _StructuredOutputs(Part):
    """vLLM's field: exactly one way to say what the answer may be."""

    json_value: Annotated[object, WithJsonSchema(_SchemaOrText)] = Field(default=None, alias="json")
    json_object: Annotated[object, WithJsonSchema({"const": True})] = None
    regex: Expression | None = None
    choice: Annotated[tuple[Expression, ...], Many(1, MAX_ENUM_ENTRIES)] | None = None
    grammar: Expression | None = None
    structural_tag: Annotated[object, WithJsonSchema(_ObjectOrText)] = None

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        given = super().given(value, info)
        if len(given) != 1:
            shown = " and ".join(f"'{name}'" for name in given) or "none of its keys"
            raise validation.wrong_number(shown, f"exactly one of {', '.join(cls.names)}")
        return given


def _structured_outputs(given: _StructuredOutputs, where: str) -> AnswerFormat:
    ((name, asked),) = ((name, getattr(given, name)) for name in given.model_fields_set)
    way = "json" if name == "json_value" else name
    path = f"{where}.{way}"
    if way == "structural_tag":
        return AnswerFormat(path, tags=_object(asked, path))
    return AnswerFormat(path, _language(way, asked, path))


StructuredOutputs = Annotated[AnswerFormat, Converted(_StructuredOutputs, _structured_outputs)]
Regex = Annotated[AnswerFormat, Converted(Expression, lambda text, path: AnswerFormat(path, pattern(text)))]
Grammar = Annotated[AnswerFormat, Converted(Expression, lambda text, path: AnswerFormat(path, _grammar(text, path)))]


def _language(way: str, asked: Any, where: str) -> Language:
    match way:
        case "json":
            schema = asked if isinstance(asked, bool) else _object(asked, where)
            return read_schema(schema, where, is_strict=True)
        case "json_object":
            if asked is not True:
                raise errors.invalid_value(where, asked, "Expected true, or no such field.")
            return json_value({"type": "object"})
        case "regex":
            return pattern(asked)
        case "choice":
            return _choice(asked, where)
    return _grammar(asked, where)


def _grammar(text: str, where: str) -> Language:
    if text.lstrip().startswith("{"):
        raise errors.invalid_value(where, text, "Expected a grammar in Lark or in GBNF.")
    return lark(text)


def _choice(texts: tuple[str, ...], where: str) -> Language:
    length = sum(map(len, texts))
    if length > MAX_EXPRESSION_LENGTH:
        raise errors.string_too_long(where, MAX_EXPRESSION_LENGTH, length)
    return one_of(texts)


def _object(value: object, where: str) -> Mapping[str, object]:
    """An object, or one written as a string of JSON."""
    if isinstance(value, str):
        value = _parsed(value, where)
    if not isinstance(value, dict):
        raise errors.invalid_type(where, "an object", value)
    return value


def _parsed(text: str, where: str) -> object:
    if not text:
        raise errors.empty_string(where)
    if len(text) > 4 * MAX_SCHEMA_CHARS:
        raise errors.string_too_long(where, 4 * MAX_SCHEMA_CHARS, len(text))
    try:
        return strict_json.parse(text.encode())
    except ValueError as error:
        raise errors.invalid_value(where, text, "Expected an object, or a string of JSON.") from error
