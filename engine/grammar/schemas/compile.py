"""From a caller's JSON schema to a grammar in Lark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferd.engine.api.grammars import SchemaUse, TagTexts
from inferd.engine.api.wire.grammar_check import Left
from inferd.engine.grammar.ports import GrammarError
from inferd.engine.grammar.schemas.reader import TYPES, Notices, Reader
from inferd.engine.grammar.schemas.shapes import SchemaError
from inferd.engine.grammar.schemas.tag_writer import TagWriter
from inferd.engine.grammar.schemas.writer import Impossible, Writer


def schema_grammar(schema: Mapping[str, Any] | bool, use: SchemaUse) -> tuple[str, tuple[Left, ...]]:
    """(the grammar of the schema's values, what of the schema is left to the model).

    Raises `GrammarError` for a schema that cannot be enforced, or, if the use is lenient, only for one that is too
    large.
    """
    owner = f" of the tool '{use.tool[:64]}'" if use.tool else ""
    notices = Notices(owner, use.way_out, is_lenient=use.is_lenient)
    notices.texts |= dict.fromkeys(use.told)
    try:
        return _written(schema, use, notices), tuple(map(Left, notices.texts))
    except Impossible as error:
        reason = f"it allows no value: {error}"
    except SchemaError as error:
        reason = str(error)
    if not use.is_lenient:
        raise GrammarError(reason)
    left = (Left(f"'{use.where}'{owner} is left to the model: {reason}", is_whole=True),)
    return _written(_without_rules(schema, use.tags), use, Notices(is_lenient=True)), left


def _written(schema: Mapping[str, Any] | bool, use: SchemaUse, notices: Notices) -> str:
    reader = Reader(schema, use.where, notices)
    if use.tags is None:
        return Writer(reader, reader.read(), notices).text()
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    named = properties.items() if isinstance(properties, Mapping) else ()
    is_named = use.tags.is_raw and not use.tags.item
    bare = {name for name, inner in named if is_named and is_bare(inner)}
    return TagWriter(reader, reader.read(), notices, use.tags, bare).text()


def _without_rules(schema: Mapping[str, Any] | bool, tags: TagTexts | None) -> Mapping[str, Any] | bool:
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
