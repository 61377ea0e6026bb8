"""The JSON types that an argument may have by its tool's schema, and the schemas of its parts.

Follows references inside the tool's schema, and unions. Callers write these schemas, so every search is bounded.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from inferd.server.tools.python_calls import literal

_MOST_PARTS = 64
"""Schemas that one search reads. What stands behind them counts as unknown."""
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_UNIONS = ("anyOf", "oneOf")
_WORDS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}


@dataclass(frozen=True, slots=True)
class ArgumentSchema:
    """The schema of one argument, or of a part of it."""

    schema: object = None
    root: object = None
    """The schema of all arguments of the tool, in which references lead to a schema."""

    @classmethod
    def of(cls, parameters: object, key: str) -> Self:
        """The schema of the argument `key`. `parameters`: the schema of all of the tool's arguments."""
        return cls(cls(parameters, parameters)._property(key), parameters)

    def part(self, key: str) -> ArgumentSchema:
        """The schema of the value behind a key of an object."""
        return ArgumentSchema(self._property(key), self.root)

    @property
    def items(self) -> ArgumentSchema:
        """The schema of the items of a list."""
        found = (part.get("items") for part in self._parts())
        return ArgumentSchema(next((items for items in found if items is not None), None), self.root)

    @property
    def types(self) -> frozenset[str]:
        """The JSON types that the schema allows; empty if it does not say."""
        return frozenset(self._types(self.schema, [_MOST_PARTS]) or ())

    def _property(self, key: str) -> object:
        others: object = None
        for part in self._parts():
            properties = part.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return properties[key]
            others = part.get("additionalProperties") if others is None else others
        return others

    def _parts(self) -> Iterator[Mapping[str, object]]:
        """The schema and those that it refers to or combines."""
        waiting, num = [self.schema], 0
        while waiting and num < _MOST_PARTS:
            schema, num = waiting.pop(0), num + 1
            if isinstance(schema, Mapping):
                yield schema
                waiting += [self._named(schema["$ref"])] if "$ref" in schema else []
                for name in ("allOf", *_UNIONS):
                    waiting += _listed(schema, name)[:_MOST_PARTS]

    def _types(self, schema: object, left: list[int]) -> set[str] | None:
        """None if the schema does not say. `left`: the number of schemas that may still be read."""
        left[0] -= 1
        if left[0] < 0 or not isinstance(schema, Mapping):
            return None
        given = schema.get("type")
        known = [{given}] if isinstance(given, str) else [set(map(str, given))] if isinstance(given, list) else []
        values = _listed(schema, "enum") or ([schema["const"]] if "const" in schema else [])
        known += [{_KINDS.get(type(value), "null") for value in values}] if values else []
        joined = [self._named(schema["$ref"])] if "$ref" in schema else []
        known += [types for one in (*joined, *_listed(schema, "allOf")) if (types := self._types(one, left))]
        for name in _UNIONS:
            choices = [self._types(one, left) for one in _listed(schema, name)]
            known += [set().union(*filter(None, choices))] if choices and all(choices) else []
        if not known:
            return None
        found = set.intersection(*({*types, "integer"} if "number" in types else types for types in known))
        found = found - {"integer"} if "number" in found else found
        return found | {"null"} if schema.get("nullable") is True else found

    def _named(self, reference: object) -> object:
        """The schema at a reference inside of `root`, such as `#/$defs/city`; None if there is none."""
        at = self.root
        path = str(reference)
        for key in path.removeprefix("#").split("/")[1:] if path.startswith("#") else ("",):
            name = key.replace("~1", "/").replace("~0", "~")
            at = at.get(name) if isinstance(at, Mapping) else None
        return at


def parameters_of(name: object, tools: Sequence[Mapping[str, object]]) -> object:
    """The schema of a tool's arguments; None if it has none."""
    functions = (tool.get("function") for tool in tools)
    found = (one for one in functions if isinstance(one, Mapping) and one.get("name") == name)
    return next((function.get("parameters") for function in found), None)


def value_of(text: str, types: frozenset[str]) -> object:
    """The value that is written as a text, for an argument of these types. If it may be a string, it is of another type
    only if JSON or Python writes it in exactly this way, so that no character is lost."""
    word = _WORDS.get(text.strip(), text)
    if not isinstance(word, str) and ("null" if word is None else "boolean") in types:
        return word
    if "string" in types or not types:
        return text if types <= {"string", "null", "boolean"} else _exact(text, types)
    return _loose(text, types)


def _exact(text: str, types: frozenset[str]) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    kind = "null" if value is None else _KINDS[type(value)]
    is_allowed = kind in types or (kind == "integer" and "number" in types)
    is_exact = isinstance(value, (list, dict)) or (kind != "string" and json.dumps(value) == text)
    return value if is_allowed and is_exact else text


def _loose(text: str, types: frozenset[str]) -> object:
    """Numbers and truth values as models write them, else JSON or Python; the text if it is none of these."""
    stripped = text.strip()
    if types & {"integer", "number"}:
        with contextlib.suppress(ValueError):
            return int(stripped)
        with contextlib.suppress(ValueError):
            number = float(stripped)
            if math.isfinite(number) and ("number" in types or number.is_integer()):
                return number if "number" in types and ("." in text or not number.is_integer()) else int(number)
    if "boolean" in types and stripped.lower() in ("true", "1", "false", "0"):
        return stripped.lower() in ("true", "1")
    if types & {"object", "array"}:
        value = _json_of(stripped)
        if isinstance(value, (dict, list)) and _KINDS[type(value)] in types:
            return value
    return text


def _json_of(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return literal(text)
    return value


def _listed(schema: Mapping[str, object], name: str) -> list[object]:
    listed = schema.get(name)
    return listed if isinstance(listed, list) else []
