"""Checks a caller's JSON schema and turns it into the language of its values.

Every keyword is enforced, or is an annotation without effect, or is refused by its path. If the schema is not strict, a
keyword that cannot be enforced is left to the model. The compiler of the grammar (`engine/grammar/schemas`) reads the
values of the keywords: it tells what it leaves to the model, and refuses what contradicts itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from inferd.engine.api.errors import RequestError
from inferd.engine.api.grammars import ANNOTATIONS, COMBINING_KEYWORDS, FORMATS, TYPE_KEYWORDS, SchemaUse, TagTexts
from inferd.server.errors import messages as errors
from inferd.server.structured.bounds import check_json, refusal
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
_KNOWN_KEYWORDS = TYPE_KEYWORDS | ANNOTATIONS | frozenset(COMBINING_KEYWORDS)

LEAVE_OUT = "Leave it out."
OR_NOT_STRICT = "Leave it out, or set 'strict' to false, which leaves it to the model."
"""Advice about a keyword that cannot be enforced: if the API has no field 'strict' there, and if it has."""


def read_schema(
    value: object,
    where: str,
    *,
    is_strict: bool,
    way_out: str = LEAVE_OUT,
    tool: str = "",
    tags: TagTexts | None = None,
    notices: Sequence[str] = (),
) -> Language:
    """The language of a schema's values. A schema is an object or a boolean. Raises `RequestError`.

    `is_strict`: whether a keyword that cannot be enforced is refused. The other parameters are those of `SchemaUse`.
    """
    if not isinstance(value, (dict, bool)):
        raise errors.invalid_type(where, "an object", value)
    if isinstance(value, dict):
        check_json(value, where, "the schema", MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH)
        _check(value, where, tool, way_out if is_strict else None)
    return json_value(value, SchemaUse(where, not is_strict, way_out, tool, tags, tuple(notices)))


def _check(value: dict[str, object], where: str, tool: str, way_out: str | None) -> None:
    """`way_out`: None if the schema is not strict."""
    num_entries = 0
    for path, schema in _subschemas(value, where):
        if way_out is not None:
            _check_keywords(schema, path, tool, way_out)
        entries = schema.get("enum", [])
        num_entries += len(entries) if isinstance(entries, list) else 0
    if num_entries > MAX_ENUM_ENTRIES:
        raise refusal(where, f"its enums have {num_entries} entries, but at most {MAX_ENUM_ENTRIES} are allowed")


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


def _check_keywords(schema: Mapping[str, object], path: _Path, tool: str, way_out: str) -> None:
    owner = f" of the tool '{errors.clip(tool, 64)}'" if tool else ""
    for key in schema:
        if key not in _KNOWN_KEYWORDS:
            rule = f"The keyword '{errors.clip(key, 64)}'{owner} cannot be enforced. {way_out}"
            raise _unsupported(f"{_joined(path)}.{key}", rule)
    form = schema.get("format")
    if form is not None and form not in FORMATS:
        rule = f"Formats{owner} that are enforced: {', '.join(FORMATS)}. {way_out}"
        raise errors.unsupported_value(f"{_joined(path)}.format", form, rule)


def _unsupported(param: str, rule: str) -> RequestError:
    shown = errors.clip(param, errors.MAX_ECHO)
    return RequestError("unsupported_value", f"Unsupported value: '{shown}'. {rule}", param)
