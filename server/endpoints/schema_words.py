"""JSON schemas for the documentation: each in a few words ("integer 1 to 128"), and the fields within one."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from inferd.server.schema.json_schema import Schema, types_of


def rule_of(schema: Schema) -> str:
    """The words for a schema."""
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    if options:
        return "; or ".join(dict.fromkeys(map(rule_of, options)))
    if "enum" in schema:
        return " or ".join(f"`{orjson.dumps(value).decode()}`" for value in schema["enum"])
    kind = schema.get("type", "any value")
    if isinstance(kind, list):
        return rule_of({**schema, "type": next(name for name in kind if name != "null")})
    if kind in ("integer", "number"):
        return f"{kind}{_range(schema.get('minimum'), schema.get('maximum'))}"
    if kind == "string":
        return "string" + _characters(schema)
    if kind == "array":
        return "array of " + _items(schema)
    return _object(schema) if kind == "object" else str(kind)


def _items(array: Schema) -> str:
    """As in "1 to 16 strings of 1 to 1,024 characters"."""
    item = array.get("items", {})
    types = types_of(item)
    kind = types.pop() if len(types) == 1 else "value"
    count = _count(array.get("minItems"), array.get("maxItems"))
    if kind == "array":
        return f"{count}arrays of {_items(item)}"
    return f"{count}{kind}s" + (_characters(item) if kind == "string" else _range(item.get("minimum"), None))


def _characters(text: Schema) -> str:
    count = _count(text.get("minLength"), text.get("maxLength"))
    return f" of {count}characters" if count else ""


def _object(schema: Schema) -> str:
    properties = schema.get("properties", {})
    if properties and all(_is_plain(value.get("type")) for value in properties.values()):
        return "object: " + ", ".join(f"`{name}` {rule_of(value)}" for name, value in properties.items())
    if isinstance(schema.get("additionalProperties"), dict):
        count = _count(None, schema.get("maxProperties"))
        return f"object of {count}keys, each {rule_of(schema['additionalProperties'])}"
    return "object"


def _is_plain(kind: object) -> bool:
    return kind in [form for name in ("integer", "boolean", "number") for form in (name, [name, "null"])]


def _range(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    return f" {_number(low)} or more" if high is None else f" {_number(low)} to {_number(high)}"


def _count(low: int | None, high: int | None) -> str:
    """The text with a space after it, unless it is empty."""
    if high is None:
        return f"{low} or more " if low else ""
    return f"{low} to {high:,} " if low else f"up to {high:,} "


def _number(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def fields_within(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """(path, schema) of every field within a value, as in `choices[].index`."""
    for option in options_of(schema):
        if "items" in option:
            yield from fields_within(option["items"], f"{path}[]")
        for name, field in option.get("properties", {}).items():
            where = f"{path}.{name}" if path else name
            yield where, field
            yield from fields_within(field, where)


def options_of(schema: Schema) -> list[Schema]:
    """The alternatives of a schema, or itself."""
    return [*schema.get("anyOf", ()), *schema.get("oneOf", ())] or [schema]
