"""The JSON types that an argument may have by its tool's schema, and the schemas of its parts.

Follows references inside the tool's schema, and unions. Callers write these schemas, so every search is bounded.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

from inferd.server.tools.python_calls import literal

_MOST_STEPS = 400
"""Parts that one search reads: schemas, items of lists and keys of references. A list that is longer than what is left
is skipped, as if the schema did not have it."""
_MOST_STEPS_OF_TOOL = 6_000
"""Parts that all searches for types in one tool's schema read. Then the types of further arguments are unknown."""
_MOST_DEPTH = 32
"""Schemas inside each other that one search reads."""
_MOST_REFERENCE_CHARS = 512
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_TYPES = frozenset((*_KINDS.values(), "null"))
_UNIONS = ("anyOf", "oneOf")
_WORDS = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False}


@dataclass(slots=True)
class _Searched:
    """Types and parts of the schemas inside a root, by their ids, so that each is searched once."""

    types: dict[int, frozenset[str]] = field(default_factory=dict)
    parts: dict[int, list[Mapping[str, object]]] = field(default_factory=dict)
    num_left: int = _MOST_STEPS_OF_TOOL


@dataclass(frozen=True, slots=True)
class ArgumentSchema:
    """The schema of all arguments of a tool, of one argument, or of a part of it. Keeps what it finds for all schemas
    that come from it, so a tool needs one in an answer."""

    schema: object = None
    root: object = None
    """The schema of all arguments of the tool, in which references lead to a schema."""
    _searched: _Searched = field(default_factory=_Searched, compare=False, repr=False)

    @classmethod
    def of_tool(cls, parameters: object) -> Self:
        """The schema of all of a tool's arguments."""
        return cls(parameters, parameters)

    def part(self, key: str) -> ArgumentSchema:
        """The schema of an argument, or of the value behind a key of an object."""
        others: object = None
        for part in self._parts():
            properties = part.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return self._inside(properties[key])
            others = part.get("additionalProperties") if others is None else others
        return self._inside(others)

    @property
    def items(self) -> ArgumentSchema:
        """The schema of the items of a list."""
        found = (part.get("items") for part in self._parts())
        return self._inside(next((items for items in found if items is not None), None))

    @property
    def types(self) -> frozenset[str]:
        """The JSON types that the schema allows; empty if it does not say."""
        known, key = self._searched.types, id(self.schema)
        if key not in known:
            most = min(_MOST_STEPS, self._searched.num_left)
            left = [most]
            known[key] = frozenset(self._types(self.schema, left, 0) or ())
            self._searched.num_left -= most - left[0]
        return known[key]

    def _inside(self, schema: object) -> ArgumentSchema:
        return ArgumentSchema(schema, self.root, self._searched)

    def _parts(self) -> list[Mapping[str, object]]:
        """The schema and those that it refers to or combines."""
        known, key = self._searched.parts, id(self.schema)
        if key not in known:
            known[key] = list(self._search())
        return known[key]

    def _search(self) -> Iterator[Mapping[str, object]]:
        waiting, left = deque([self.schema]), [_MOST_STEPS]
        while waiting:
            schema = waiting.popleft()
            if isinstance(schema, Mapping):
                yield schema
                waiting += self._referred(schema, left)
                for name in ("allOf", *_UNIONS):
                    waiting += _listed(schema, name, left)

    # `left`, below: the number of parts that the search may still read.

    def _types(self, schema: object, left: list[int], depth: int) -> set[str] | None:
        """None if the schema does not say."""
        if depth == _MOST_DEPTH or not isinstance(schema, Mapping):
            return None
        given = schema.get("type")
        named = _listed(schema, "type", left) if isinstance(given, list) else [given]
        values = _listed(schema, "enum", left) or ([schema["const"]] if "const" in schema else [])
        known = [
            {name for name in named if isinstance(name, str) and name in _TYPES},
            {_KINDS.get(type(value), "null") for value in values},
        ]
        for one in (*self._referred(schema, left), *_listed(schema, "allOf", left)):
            known.append(self._types(one, left, depth + 1) or set())
        for union in _UNIONS:
            choices = [self._types(one, left, depth + 1) for one in _listed(schema, union, left)]
            known.append(set().union(*filter(None, choices)) if all(choices) else set())
        said = [{*types, "integer"} if "number" in types else types for types in known if types]
        if not said:
            return None
        found = set.intersection(*said)
        found = found - {"integer"} if "number" in found else found
        return found | {"null"} if schema.get("nullable") is True else found

    def _referred(self, schema: Mapping[str, object], left: list[int]) -> list[object]:
        """The schema at the reference inside of `root`, such as `#/$defs/city`; none if it leads nowhere."""
        path = schema.get("$ref")
        if not isinstance(path, str) or len(path) > _MOST_REFERENCE_CHARS or not path.startswith("#"):
            return []
        keys = path.removeprefix("#").split("/")[1:]
        if len(keys) >= left[0]:
            return []
        left[0] -= len(keys) + 1
        at = self.root
        for key in keys:
            name = key.replace("~1", "/").replace("~0", "~")
            at = at.get(name) if isinstance(at, Mapping) else None
        return [at]


def schemas_of(tools: Iterable[Mapping[str, object]]) -> dict[str, ArgumentSchema]:
    """The schema of each tool's arguments, by the tool's name."""
    found: dict[str, ArgumentSchema] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping):
            found.setdefault(str(function.get("name")), ArgumentSchema.of_tool(function.get("parameters")))
    return found


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
        value = json.loads(text, object_pairs_hook=once)
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
        value: object = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError):
        return literal(text)
    return value


def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON, as a hook of its decoder. Raises `ValueError` for a key that it has twice: a value would be
    lost."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")
    return found


def _listed(schema: Mapping[str, object], name: str, left: list[int]) -> list[object]:
    listed = schema.get(name)
    if not isinstance(listed, list) or len(listed) > left[0]:
        return []
    left[0] -= len(listed)
    return listed
