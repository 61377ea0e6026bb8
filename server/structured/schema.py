"""Checks a caller's JSON schema and turns it into the language of its values.

Every keyword is enforced, or is an annotation without effect, or is refused by its path. If the schema is not strict, a
keyword that cannot be enforced is left to the model. The compiler of the grammar finds contradictory keywords.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

from inferd.engine.api.errors import RequestError
from inferd.server.errors import table as errors
from inferd.server.structured.bounds import check_json, refusal
from inferd.server.structured.intervals import has_bounds, make_exact
from inferd.server.structured.language import Language, json_value

MAX_SCHEMA_CHARS = 64 * 1024
"""Most characters of a schema's JSON, escapes not counted."""
MAX_SCHEMA_DEPTH = 64
"""Most levels of JSON: an object in an object's properties is two levels deeper."""
MAX_ENUM_ENTRIES = 4_096
"""Most entries of all enums of a schema together."""

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

_WAY_OUT = "Leave it out; if the field has 'strict', false leaves it to the model."


def read_schema(value: object, where: str, *, is_strict: bool) -> Language:
    """The language of a schema's values. A schema is an object or a boolean. Raises `RequestError`."""
    if isinstance(value, bool):
        return json_value(value)
    if not isinstance(value, dict):
        raise errors.invalid_type(where, "an object", value)
    check_json(value, where, "the schema", MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH)
    num_entries = 0
    for path, schema in _subschemas(value, where):
        if is_strict:
            _check_keywords(schema, path)
        entries = schema.get("enum", [])
        if not isinstance(entries, list):
            raise errors.invalid_type(f"{_joined(path)}.enum", "an array", entries)
        num_entries += len(entries)
    if num_entries > MAX_ENUM_ENTRIES:
        raise refusal(where, f"its enums have {num_entries} entries, but at most {MAX_ENUM_ENTRIES} are allowed")
    return json_value(with_exact_bounds(value), is_lenient=not is_strict)


def with_exact_bounds(schema: Mapping[str, object]) -> Mapping[str, object]:
    """The schema with bounds of numbers that llguidance enforces exactly (`intervals`)."""
    if not any(has_bounds(inner) for _, inner in _subschemas(schema, "")):
        return schema
    exact = copy.deepcopy(dict(schema))
    for _, inner in _subschemas(exact, ""):
        make_exact(inner)
    return exact


def has_reference(schema: Mapping[str, object]) -> bool:
    """Whether a schema, or one in it, refers to another one by `$ref`."""
    return any("$ref" in inner for _, inner in _subschemas(schema, ""))


_Path = tuple["_Path | None", str]
"""(path of the parent, the last part). Joined only for an error, because a name may be as long as the schema."""


def _joined(path: _Path | None) -> str:
    parts: list[str] = []
    while path is not None:
        path, part = path
        parts.append(part)
    return "".join(reversed(parts))


def _subschemas(value: object, where: str) -> Iterator[tuple[_Path, dict[str, object]]]:
    """(path, schema) of a schema and of every schema in it, the outermost first."""
    waiting: list[tuple[_Path, object]] = [((None, where), value)]
    while waiting:
        path, schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield path, schema
        for key in _SCHEMA_KEYWORDS:
            waiting.append(((path, f".{key}"), schema.get(key)))
        for key in (*_LIST_KEYWORDS, "items"):
            entries = schema.get(key)
            for i, entry in enumerate(entries if isinstance(entries, list) else ()):
                waiting.append(((path, f".{key}[{i}]"), entry))
        for key in _MAP_KEYWORDS:
            named = schema.get(key)
            for name, entry in named.items() if isinstance(named, dict) else ():
                waiting.append(((path, f".{key}.{name}"), entry))


def _check_keywords(schema: Mapping[str, object], path: _Path) -> None:
    for key in schema:
        if key not in ENFORCED_KEYWORDS and key not in ANNOTATIONS:
            rule = f"The keyword '{errors.clip(key, 64)}' cannot be enforced. {_WAY_OUT}"
            raise _unsupported(f"{_joined(path)}.{key}", rule)
    form = schema.get("format")
    if form is not None and form not in ENFORCED_FORMATS:
        rule = f"Formats that are enforced: {', '.join(ENFORCED_FORMATS)}. {_WAY_OUT}"
        raise errors.unsupported_value(f"{_joined(path)}.format", form, rule)


def _unsupported(param: str, rule: str) -> RequestError:
    shown = errors.clip(param, errors.MAX_ECHO)
    return RequestError("unsupported_value", f"Unsupported value: '{shown}'. {rule}", param)
