"""From a caller's JSON schema to a grammar in Lark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferd.engine.api.wire.grammar_check import Left
from inferd.engine.grammar.ports import GrammarError
from inferd.engine.grammar.schemas.reader import TYPES, Notices, Reader
from inferd.engine.grammar.schemas.shapes import SchemaError
from inferd.engine.grammar.schemas.writer import Impossible, Writer


def schema_grammar(
    json_schema: Mapping[str, Any] | bool,
    where: str,
    *,
    is_lenient: bool,
    way_out: str = "",
    tool: str = "",
    tags: Sequence[str] | None = None,
    told: Sequence[str] = (),
) -> tuple[str, tuple[Left, ...]]:
    """(the grammar of the schema's values, what of the schema is left to the model).

    `where`: the schema's path in the request. `way_out`: what a refusal advises. `tool`: name of the tool that has the
    schema. `tags`: given if an object is written as its properties in tags: the texts before, between and behind the
    name and the value of each. `told`: what else is left to the model.

    Raises `GrammarError` for a schema that cannot be enforced, or, if `is_lenient`, only for one that is too large.
    """
    owner = f" of the tool '{tool[:64]}'" if tool else ""
    notices = Notices(owner, way_out, is_lenient=is_lenient)
    notices.texts |= dict.fromkeys(told)
    try:
        return _written(json_schema, where, notices, tags), tuple(map(Left, notices.texts))
    except Impossible as error:
        reason = f"it allows no value: {error}"
    except SchemaError as error:
        reason = str(error)
    if not is_lenient:
        raise GrammarError(reason)
    left = (Left(f"'{where}'{owner} is left to the model: {reason}", is_whole=True),)
    return _written(_without_rules(json_schema, tags), where, Notices(is_lenient=True), tags), left


def _written(schema: Mapping[str, Any] | bool, where: str, notices: Notices, tags: Sequence[str] | None) -> str:
    reader = Reader(schema, where, notices)
    writer = Writer(reader, reader.read(), notices)
    if tags is None:
        return writer.text()
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    named = properties.items() if isinstance(properties, Mapping) else ()
    return writer.tagged_text(tags, {name for name, inner in named if is_bare(inner)})


def _without_rules(schema: Mapping[str, Any] | bool, tags: Sequence[str] | None) -> Mapping[str, Any] | bool:
    """The schema's type, and the names of its properties if only those can be written."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping) or not isinstance(kind, str) or kind not in TYPES:
        return True
    properties = schema.get("properties")
    if tags is None or not isinstance(properties, Mapping):
        return {"type": kind}
    bare = {name: {"type": "string"} if is_bare(inner) else {} for name, inner in properties.items()}
    return {"type": kind, "properties": bare}


def is_bare(schema: object) -> bool:
    """Whether a value in tags is a string, which is written as it is. Any other value is written as JSON."""
    if not isinstance(schema, Mapping):
        return False
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    is_listed = isinstance(listed, list) and bool(listed) and all(isinstance(entry, str) for entry in listed)
    return is_listed or schema.get("type") == "string"
