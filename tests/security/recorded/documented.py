"""Statements that an OpenAPI document makes, as a set: two documents say the same however each nests its schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Statement = tuple[str, ...]

_BOUNDS = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems",
    "maxProperties", "pattern", "default",
)  # fmt: skip
_MAX_DEPTH = 12
"""Longest path of properties that is followed: a schema may contain itself."""


def statements(document: dict[str, Any]) -> set[Statement]:
    """Operations, parameters, properties with kinds and bounds, answers with their headers, and error codes."""
    return {
        (method, path, *told)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for told in _of_operation(document, operation)
    }


def _of_operation(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[Statement]:
    yield ("operation", operation["operationId"])
    if operation.get("summary"):
        yield ("has a summary",)
    yield from (("tag", tag) for tag in operation["tags"])
    yield from (("security", name) for scheme in operation["security"] for name in scheme)
    for parameter in operation.get("parameters", ()):
        where = f"{parameter['in']} {parameter['name']}"
        yield ("parameter", where)
        yield from _of_schema(document, parameter["schema"], where)
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        yield ("body", media)
        yield from _of_schema(document, content["schema"], "body")
    for status, response in operation["responses"].items():
        yield ("answer", status)
        answer = _resolved(document, response)
        yield from (("header", status, name.lower()) for name in answer.get("headers", ()))
        for media, content in answer.get("content", {}).items():
            yield ("answer", status, media)
            if "schema" in content:
                yield from _of_schema(document, content["schema"], f"answer {status}")


def _of_schema(document: dict[str, Any], schema: Any, where: str) -> Iterator[Statement]:
    if not isinstance(schema, dict) or where.count(".") + where.count("[]") > _MAX_DEPTH:
        return
    schema = _resolved(document, schema)
    if schema.get("description"):
        yield (where, "has a description")
    kinds = schema.get("type", ())
    yield from ((where, "type", kind) for kind in ((kinds,) if isinstance(kinds, str) else kinds))
    yield from ((where, name, _told(schema[name])) for name in _BOUNDS if name in schema)
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    yield from ((where, "value", json.dumps(value)) for value in values)
    yield from ((where, "required", name) for name in schema.get("required", ()))
    if schema.get("additionalProperties") is False:
        yield (where, "no other properties")
    for name, inner in schema.get("properties", {}).items():
        yield (where, "property", name)
        yield from _of_schema(document, inner, f"{where}.{name}")
    yield from _of_schema(document, schema.get("items"), f"{where}[]")
    yield from _of_schema(document, schema.get("additionalProperties"), f"{where}.*")
    for keyword in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(keyword, ()):
            yield from _of_schema(document, option, where)


def _told(value: Any) -> str:
    """1 and 1.0 are one number."""
    return json.dumps(float(value) if type(value) is int and abs(value) < 2**53 else value)


def _resolved(document: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in value:
        found: Any = document
        for part in value["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        value = {**found, **{key: item for key, item in value.items() if key != "$ref"}}
    return value
