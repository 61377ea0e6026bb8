"""JSON schemas of request models and of answers, for the documentation, /openapi.json, queries and the tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema
from typing_extensions import get_original_bases, is_typeddict

from inferd.server.schema.request_model import Part, RequestModel

Schema = dict[str, Any]
"""JSON schema (draft 2020-12) of a value."""

_MODE: Literal["validation"] = "validation"
"""Pydantic's schemas for reading and for writing differ by defaults, which answers do not have."""


@functools.cache
def schema_of(model: type[RequestModel]) -> Schema:
    """Every field with type, bounds and default, and other servers' names for some of them.

    Each field also has `x-unset`, `x-area`, `x-has-effect` and `x-kind`, which come from the arguments of
    `model.option`.
    """
    made = model.model_json_schema(schema_generator=_Generator)
    shared = made.pop("$defs", {})
    schema: Schema = inlined(made, shared)
    properties = schema["properties"]
    for alias, name in model.aliases.items():
        properties[alias] = {**properties[name], "description": f"Another name of `{name}`."}
    unused = {"x-unset": "", "x-area": "", "x-has-effect": False, "x-kind": "offer"}
    for name, about in model.offered.items():
        properties[name] = {"description": f"It is not used: {about}.", **unused}
    only_one = [
        {"anyOf": [{"properties": {one: {"type": "null"}}} for one in names]} for names in model.aliases.items()
    ]
    return {**schema, "required": list(model.required), **({"allOf": only_one} if only_one else {})}


def inlined(value: Any, shared: Schema) -> Any:
    """`value` with the definition in place of every reference to one."""
    if isinstance(value, list):
        return [inlined(item, shared) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return inlined(shared[value["$ref"].rpartition("/")[2]], shared)
    return {key: inlined(item, shared) for key, item in value.items()}


class _Generator(GenerateJsonSchema):
    """Without titles, and with null among the types of a field that may be left out."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return or_null(self.generate_inner(schema["schema"]))

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        made, model = super().model_schema(schema), schema["cls"]
        if issubclass(model, Part):
            optional = made["properties"].keys() - made.get("required", ())
            made["properties"] |= {name: or_null(made["properties"][name]) for name in optional}
            made["properties"] |= {name: {} for name in (*model.without_effect, *model.offered)}
        return {key: value for key, value in made.items() if key != "title"}

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        first, *others = schema["expected"]
        return {"type": "string", "enum": [first, *others]} if others else {"type": "string", "const": first}

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        return {"anyOf": super().tagged_union_schema(schema)["oneOf"]}

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        if schema.get("default") is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


def schemas_of_answers(kinds: Sequence[Any], ref_template: str) -> tuple[list[Schema], dict[str, Schema]]:
    """(schema of each type, name of an object -> its schema). `ref_template` refers to the object `{model}`."""
    asked = ((i, _MODE, TypeAdapter(kind)) for i, kind in enumerate(kinds))
    made, shared = TypeAdapter.json_schemas(asked, ref_template=ref_template, schema_generator=_AnswerGenerator)
    return [made[i, _MODE] for i in range(len(kinds))], shared["$defs"]


class _AnswerGenerator(GenerateJsonSchema):
    """Without titles. A field that an object inherits has its base's description, which pydantic leaves out."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        made = super().typed_dict_schema(schema)
        made.pop("title", None)
        for base in filter(is_typeddict, get_original_bases(schema["cls"])):
            for name, text in _descriptions(base).items():
                made["properties"][name].setdefault("description", text)
        return made


@functools.cache
def _descriptions(kind: Any) -> dict[str, str]:
    """Descriptions of an object's fields."""
    properties = TypeAdapter(kind).json_schema(schema_generator=_AnswerGenerator).get("properties", {})
    return {name: field["description"] for name, field in properties.items() if "description" in field}


def types_of(schema: Schema) -> set[str]:
    """The JSON types that a value may have, as JSON schema names them; an `enum` has those of its values."""
    if "type" in schema:
        return {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
    options: list[Schema] = schema.get("anyOf", [])
    return {_type_of(value) for value in schema.get("enum", ())}.union(*map(types_of, options))


def _type_of(value: object) -> str:
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def or_null(schema: Schema) -> Schema:
    """JSON null stands for "not given"."""
    if not schema or "null" in schema.get("type", ()) or None in schema.get("enum", ()):
        return schema
    if isinstance(schema.get("type"), str) and not {"enum", "const"} & set(schema):
        return {**schema, "type": [schema["type"], "null"]}
    options = schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
    # Among a few values, null is one of them.
    null = {"type": "null", "enum": [None]} if "enum" in schema else {"type": "null"}
    return {"anyOf": [*options, null]}
