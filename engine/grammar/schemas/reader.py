"""Reads a caller's JSON schema into nodes (`shapes`).

The reader refuses a keyword that it cannot enforce, with its path. A lenient reader leaves the keyword to the model
instead, and tells the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from inferd.engine.api.grammars import ANNOTATIONS, COMBINING_KEYWORDS, NUMBER_KEYWORDS, TYPE_KEYWORDS
from inferd.engine.grammar.schemas.numbers import number_of
from inferd.engine.grammar.schemas.regexes import PatternNames, fault
from inferd.engine.grammar.schemas.shapes import (
    AnyOf,
    Anything,
    Arrays,
    Booleans,
    Intersections,
    Node,
    Nothing,
    Null,
    Numbers,
    Objects,
    OneOf,
    Reference,
    SchemaError,
    Strings,
    any_of,
    checked_object,
)
from inferd.engine.grammar.schemas.strings import FORMATS

_EVERY_TYPE = ("null", "boolean", "number", "string", "array", "object")
TYPES = (*_EVERY_TYPE, "integer")
_INDEX = re.compile("[0-9]{1,9}")
_OLD_DRAFT = re.compile(r"draft-0[467]|2019-09")

_ABSENT = object()


@dataclass(slots=True)
class Read:
    """A schema that was read."""

    root: Node
    definitions: Mapping[str, Node]
    """The node of each `Reference`."""


class KeywordError(SchemaError):
    """The text begins with the path of the keyword that it is about."""


class Notices:
    """Parts of a schema that are left to the model, each once. If the schema is strict, they are refused."""

    def __init__(self, owner: str = "", way_out: str = "", *, is_lenient: bool) -> None:
        """`owner`: words behind a path that say whose schema it is. `way_out`: what a refusal advises."""
        self._owner, self._way_out, self._is_lenient = owner, way_out, is_lenient
        self.texts: dict[str, None] = {}

    def leave(self, path: str, reason: str) -> None:
        """`path`: that of the keyword. Raises `KeywordError` if nothing may be left to the model."""
        if not self._is_lenient:
            raise KeywordError(f"'{_short(path)}'{self._owner}: {reason}. {self._way_out}".strip())
        self.texts[f"'{_short(path)}'{self._owner} is left to the model: {reason}"] = None


def _short(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:120]}...{path[-77:]}"


class Reader:
    """Reads one schema. `where`: its path in the request, for messages."""

    def __init__(self, schema: Mapping[str, Any] | bool, where: str, notices: Notices) -> None:
        self._whole, self._where, self._notices = schema, where, notices
        self.names = PatternNames()
        self._combine = Intersections(self.names, self._resolve)
        self._definitions: dict[str, Node | None] = {}
        """By pointer; None while it is being read."""
        self._is_old = isinstance(schema, dict) and _OLD_DRAFT.search(str(schema.get("$schema", ""))) is not None

    def read(self) -> Read:
        """Raises `SchemaError`."""
        root = self._node(self._whole, self._where)
        self._check_endless(root)
        definitions = {pointer: node for pointer, node in self._definitions.items() if node is not None}
        return Read(root, definitions)

    def property_of(self, schema: Objects, name: str) -> Node:
        return self._combine.property_of(schema, name)

    # -- schemas -----------------------------------------------------------------------------------------------------

    def _node(self, schema: Any, path: str) -> Node:
        self._combine.step()
        if schema is True or (isinstance(schema, dict) and not schema):
            return Anything()
        if schema is False:
            return Nothing(f"{_short(path)} is false")
        if not isinstance(schema, dict):
            self._notices.leave(path, "a schema is an object or a boolean")
            return Anything()
        result: Node = Anything()
        for key in self._ordered(schema, path):
            try:
                node = self._simple(schema, path) if key == "type" else self._combined(key, schema[key], path)
                result = self._intersected(result, node)
            except KeywordError:
                raise
            except SchemaError as error:
                self._notices.leave(f"{path}.{key}", str(error))
        return result

    def _ordered(self, schema: dict[str, Any], path: str) -> list[str]:
        """The keywords that combine schemas, and "type" in the place of all others: the order of the properties."""
        found: list[str] = []
        for key in schema:
            if key in COMBINING_KEYWORDS:
                found.append(key)
            elif key in TYPE_KEYWORDS:
                if key == "properties" and "type" in found:
                    found.remove("type")
                if "type" not in found:
                    found.append("type")
            elif key not in ANNOTATIONS:
                self._notices.leave(f"{path}.{key}", "this keyword cannot be enforced")
        return found

    def _intersected(self, one: Node, other: Node) -> Node:
        if isinstance(one, Anything):
            return other
        return self._combine.intersect(one, other)

    def _combined(self, key: str, value: Any, path: str) -> Node:
        where = f"{path}.{key}"
        if key == "const":
            return _constant(value)
        if key == "$ref":
            return self._reference(value, where)
        if not isinstance(value, list) or not value:
            self._notices.leave(where, "it must be an array of at least one entry")
            return Anything()
        if key == "enum":
            return any_of([_constant(entry) for entry in value])
        nodes = [self._node(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
        if key == "anyOf":
            return any_of(nodes)
        if key == "oneOf":
            return self._combine.one_of(nodes, where)
        result: Node = Anything()
        for node in nodes:
            result = self._intersected(result, node)
        return result

    # -- references --------------------------------------------------------------------------------------------------

    def _reference(self, value: Any, where: str) -> Node:
        if not isinstance(value, str):
            self._notices.leave(where, "it must be a string")
            return Anything()
        if self._target(value) is _ABSENT:
            self._notices.leave(where, f"{value[:80]!r} names nothing in this schema")
            return Anything()
        self._define(value)
        return Reference(value)

    def _define(self, pointer: str) -> None:
        if pointer not in self._definitions:
            self._definitions[pointer] = None
            path = self._where + "".join(f".{part}" for part in _parts(pointer))
            self._definitions[pointer] = self._node(self._target(pointer), path)

    def _resolve(self, pointer: str) -> Node:
        self._define(pointer)
        node = self._definitions[pointer]
        if node is None:
            raise SchemaError(f"the reference {pointer[:80]!r} leads back to itself beside other keywords")
        return node

    def _target(self, pointer: str) -> Any:
        found: Any = self._whole
        if not pointer.startswith("#") or (len(pointer) > 1 and pointer[1] != "/"):
            return _ABSENT
        for part in _parts(pointer):
            if isinstance(found, list) and _INDEX.fullmatch(part) and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                return _ABSENT
        return found

    def _check_endless(self, root: Node) -> None:
        """Raises `SchemaError` if a reference leads back to itself before it allows any text."""
        for start in (root, *filter(None, self._definitions.values())):
            waiting, seen = [start], set[str]()
            while waiting:
                node = waiting.pop()
                if isinstance(node, (AnyOf, OneOf)):
                    waiting.extend(node.options)
                elif isinstance(node, Reference) and node.pointer not in seen:
                    seen.add(node.pointer)
                    inner = self._definitions[node.pointer]
                    waiting.extend([inner] if inner is not None else [])
                    if inner is start and inner is not root:
                        raise SchemaError(
                            f"the reference {node.pointer[:80]!r} leads back to itself before it allows any text"
                        )

    # -- types -------------------------------------------------------------------------------------------------------

    def _simple(self, schema: dict[str, Any], path: str) -> Node:
        given = schema.get("type", list(_EVERY_TYPE))
        types = given if isinstance(given, list) else [given]
        if not types or not all(isinstance(name, str) and name in TYPES for name in types):
            self._notices.leave(f"{path}.type", f"types are {', '.join(TYPES)}")
            types = list(_EVERY_TYPE)
        return any_of([self._typed(name, schema, path) for name in dict.fromkeys(types)])

    def _typed(self, name: str, schema: dict[str, Any], path: str) -> Node:
        match name:
            case "null":
                return Null()
            case "boolean":
                return Booleans()
            case "string":
                return self._strings(schema, path)
            case "array":
                return self._arrays(schema, path)
            case "object":
                return self._objects(schema, path)
        return self._numbers(schema, path, is_whole=name == "integer")

    def _numbers(self, schema: dict[str, Any], path: str, *, is_whole: bool) -> Node:
        found: Node = Numbers(is_whole=is_whole)
        for key in NUMBER_KEYWORDS:
            if key not in schema:
                continue
            value, is_open = schema[key], key.startswith("exclusive")
            if is_open and isinstance(value, bool):  # of draft 4
                if not value:
                    continue
                value = schema.get("minimum" if key == "exclusiveMinimum" else "maximum")
            number = number_of(value)
            if number is None or (key == "multipleOf" and not number):
                rule = "a number other than 0" if key == "multipleOf" else "a number"
                self._notices.leave(f"{path}.{key}", f"it must be {rule}")
            elif key == "multipleOf":
                found = self._combine.intersect(found, Numbers(step=abs(number)))
            elif key.endswith(("minimum", "Minimum")):
                found = self._combine.intersect(found, Numbers(low=number, low_open=is_open))
            else:
                found = self._combine.intersect(found, Numbers(high=number, high_open=is_open))
        return found

    def _strings(self, schema: dict[str, Any], path: str) -> Node:
        pattern, form = schema.get("pattern"), schema.get("format")
        patterns: tuple[str, ...] = ()
        if pattern is not None:
            reason = fault(Strings(patterns=(pattern,))) if isinstance(pattern, str) else "it must be a string"
            if reason:
                self._notices.leave(f"{path}.pattern", reason)
            else:
                patterns = (pattern,)
        formats: tuple[str, ...] = ()
        if form is not None:
            if form in FORMATS:
                formats = (form,)
            else:
                self._notices.leave(f"{path}.format", f"formats are {', '.join(FORMATS)}")
        low, high = self._count(schema, path, "minLength"), self._count(schema, path, "maxLength")
        return Strings(low or 0, high, patterns, formats)

    def _arrays(self, schema: dict[str, Any], path: str) -> Node:
        low, high = self._count(schema, path, "minItems"), self._count(schema, path, "maxItems")
        items, first, key = schema.get("items", True), schema.get("prefixItems", ()), "prefixItems"
        if isinstance(items, list):
            first, items, key = items, schema.get("additionalItems", True), "items"
        elif self._is_old or "additionalItems" in schema:
            first = ()
        if not isinstance(first, (list, tuple)):
            self._notices.leave(f"{path}.{key}", "it must be an array of schemas")
            first = ()
        nodes = tuple(self._node(entry, f"{path}.{key}[{i}]") for i, entry in enumerate(first))
        rest = self._node(items, f"{path}.{'additionalItems' if key == 'items' else 'items'}")
        return Arrays(low or 0, high, nodes, rest)

    def _objects(self, schema: dict[str, Any], path: str) -> Node:
        low, high = self._count(schema, path, "minProperties"), self._count(schema, path, "maxProperties")
        properties = self._named(schema, path, "properties")
        patterns = {}
        for pattern, node in self._named(schema, path, "patternProperties").items():
            reason = fault(Strings(patterns=(pattern,)))
            if reason:
                self._notices.leave(f"{path}.patternProperties.{pattern}", reason)
            else:
                patterns[pattern] = node
        try:
            self.names.check_apart(list(patterns))
        except SchemaError as error:
            self._notices.leave(f"{path}.patternProperties", str(error))
            patterns = {}
        for name in properties if patterns else ():
            for pattern, node in patterns.items():
                if self.names.matches(pattern, name):
                    properties[name] = self._combine.intersect(properties[name], node)
        rest = self._node(schema.get("additionalProperties", True), f"{path}.additionalProperties")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            self._notices.leave(f"{path}.required", "it must be an array of strings")
            required = []
        return checked_object(Objects(properties, patterns, rest, tuple(dict.fromkeys(required)), low or 0, high, path))

    def _named(self, schema: dict[str, Any], path: str, key: str) -> dict[str, Node]:
        named = schema.get(key, {})
        if not isinstance(named, dict):
            self._notices.leave(f"{path}.{key}", "it must be an object of schemas")
            return {}
        return {name: self._node(inner, f"{path}.{key}.{name}") for name, inner in named.items()}

    def _count(self, schema: dict[str, Any], path: str, key: str) -> int | None:
        """None if it is not given."""
        value = schema.get(key)
        if value is None:
            return None
        number = number_of(value)
        if number is None or number < 0 or number.denominator != 1:
            self._notices.leave(f"{path}.{key}", "it must be a whole number of at least 0")
            return None
        return int(number)


def _parts(pointer: str) -> list[str]:
    parts = unquote(pointer[2:]).split("/") if len(pointer) > 2 else []
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]


def _constant(value: Any) -> Node:
    number = number_of(value)
    if number is not None:
        return Numbers(number, number, is_whole=isinstance(value, int))
    if isinstance(value, bool):
        return Booleans(value)
    if isinstance(value, str):
        return Strings(value=value)
    if isinstance(value, list):
        return Arrays(len(value), len(value), tuple(map(_constant, value)), Nothing("the array is constant"))
    if isinstance(value, dict):
        properties = {name: _constant(inner) for name, inner in value.items()}
        return Objects(properties, rest=Nothing("the object is constant"), required=tuple(properties))
    return Null()
