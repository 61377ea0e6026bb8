"""A caller's JSON schema: within bounds, of keywords that are enforced, and as the language of its values.

Every keyword is enforced, says nothing about validity (annotations), or is refused by its path; a lenient reading
leaves what cannot be enforced to the model. What the keywords say together is found where the grammar is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from inferd.engine.api.errors import RequestError
from inferd.server import errors
from inferd.server.structured.language import Language, json_value

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64
"""Levels of JSON: an object in an object's properties is two further down."""
MAX_ENUM_ENTRIES = 4_096
"""Of all enums of a schema together."""

_SCHEMA_KEYWORDS = ("items", "additionalProperties", "additionalItems")
_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
_VALUE_KEYWORDS = (
    "type", "const", "enum", "$ref", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "minLength", "maxLength", "pattern", "format", "minItems", "maxItems", "minProperties",
    "maxProperties",
)  # fmt: skip
ENFORCED_KEYWORDS = frozenset((*_SCHEMA_KEYWORDS, *_LIST_KEYWORDS, *_MAP_KEYWORDS, *_VALUE_KEYWORDS))
ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
        "$schema", "$id", "id", "$anchor", "contentEncoding", "contentMediaType", "discriminator", "x-guidance",
    )
)  # fmt: skip
ENFORCED_FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip

_WAY_OUT = "Leave it out; where a field has 'strict', false leaves it to the model."


def read_schema(value: object, where: str, *, is_strict: bool) -> Language:
    """The values of a schema: an object, or `true` for any value. Raises `RequestError`."""
    if isinstance(value, bool):
        return json_value(value)
    if not isinstance(value, dict):
        raise errors.invalid_type(where, "an object", value)
    _check_size(value, where)
    for path, schema in _subschemas(value, where):
        if is_strict:
            _check_keywords(schema, path)
        if "enum" in schema and not isinstance(schema["enum"], list):
            raise errors.invalid_type(f"{path}.enum", "an array", schema["enum"])
    _check_enums(value, where)
    exact = _with_exact_bounds(value)
    assert isinstance(exact, dict)
    return json_value(exact, is_lenient=not is_strict)


_LEAST_EXCESS = 1e-9


def _with_exact_bounds(value: object) -> object:
    """The schema without exclusive bounds that llguidance 1.9.1 takes for inclusive ones: of an interval between a
    whole number and the next one away from 0. Of the numbers between, those within `_LEAST_EXCESS` of the bound are
    lost."""
    if isinstance(value, list):
        return [_with_exact_bounds(item) for item in value]
    if not isinstance(value, dict):
        return value
    changed = {
        key: item if key in ("const", "enum", "default", "examples") else _with_exact_bounds(item)
        for key, item in value.items()
    }
    low, high = _number(value, "exclusiveMinimum"), _number(value, "exclusiveMaximum")
    highs = [bound for bound in (high, _number(value, "maximum")) if bound is not None]
    lows = [bound for bound in (low, _number(value, "minimum")) if bound is not None]
    if low is not None and low >= 0 and low % 1 == 0 and highs and min(highs) < low + 1:
        del changed["exclusiveMinimum"]
        changed["minimum"] = low + _LEAST_EXCESS
    elif high is not None and high <= 0 and high % 1 == 0 and lows and max(lows) > high - 1:
        del changed["exclusiveMaximum"]
        changed["maximum"] = high - _LEAST_EXCESS
    return changed


def _number(schema: Mapping[str, object], key: str) -> float | None:
    value = schema.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _check_size(value: Mapping[str, object], where: str) -> None:
    depth = _depth(value)
    if depth > MAX_SCHEMA_DEPTH:
        rule = f"the schema is nested {depth} levels deep, and at most {MAX_SCHEMA_DEPTH} are served"
        raise _refusal(where, rule)
    try:
        num_bytes = len(json.dumps(value, ensure_ascii=False))
    except ValueError as error:  # a number of more digits than Python writes
        raise _refusal(where, "the schema holds a number that is too long") from error
    if num_bytes > MAX_SCHEMA_BYTES:
        rule = f"the schema has {num_bytes} bytes of JSON, and at most {MAX_SCHEMA_BYTES} are served"
        raise _refusal(where, rule)


def _depth(value: object) -> int:
    """Levels of objects and arrays, level by level: a body may be nested deeper than a stack."""
    depth, level = 0, [value]
    while level:
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        depth += any(isinstance(item, (dict, list)) for item in level)
        level = inner
    return depth


def _subschemas(value: object, path: str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Every schema in a schema, itself first, with its path."""
    if not isinstance(value, dict):
        return
    yield path, value
    for key in _SCHEMA_KEYWORDS:
        yield from _subschemas(value.get(key), f"{path}.{key}")
    for key in (*_LIST_KEYWORDS, "items"):
        entries = value.get(key)
        for i, entry in enumerate(entries if isinstance(entries, list) else ()):
            yield from _subschemas(entry, f"{path}.{key}[{i}]")
    for key in _MAP_KEYWORDS:
        named = value.get(key)
        for name, entry in named.items() if isinstance(named, dict) else ():
            yield from _subschemas(entry, f"{path}.{key}.{name}")


def _check_keywords(schema: Mapping[str, object], path: str) -> None:
    for key in schema:
        if key not in ENFORCED_KEYWORDS and key not in ANNOTATIONS:
            rule = f"The keyword '{errors.clip(key, 64)}' cannot be enforced. {_WAY_OUT}"
            raise _unsupported(f"{path}.{key}", rule)
    form = schema.get("format")
    if form is not None and form not in ENFORCED_FORMATS:
        rule = f"Formats that are enforced: {', '.join(ENFORCED_FORMATS)}. {_WAY_OUT}"
        raise errors.unsupported_value(f"{path}.format", form, rule)


def _check_enums(value: object, where: str) -> None:
    num_entries = sum(
        len(entries) for _, schema in _subschemas(value, where) if isinstance(entries := schema.get("enum"), list)
    )
    if num_entries > MAX_ENUM_ENTRIES:
        raise _refusal(where, f"its enums have {num_entries} entries, and at most {MAX_ENUM_ENTRIES} are served")


def _refusal(param: str, reason: str) -> RequestError:
    return RequestError("invalid_value", f"Invalid value for '{errors.clip(param, errors.MAX_ECHO)}': {reason}.", param)


def _unsupported(param: str, rule: str) -> RequestError:
    shown = errors.clip(param, errors.MAX_ECHO)
    return RequestError("unsupported_value", f"Unsupported value: '{shown}'. {rule}", param)
