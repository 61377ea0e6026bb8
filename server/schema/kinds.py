"""What one JSON value may be: small validators that read a parsed value or refuse it in OpenAI's words.

Each kind has a `name`, as error messages spell it, `read(value, where)`, which returns the value in the product's own
types or raises `RequestError`, and a `schema`, from which the documentation, /openapi.json and the boundary tests are
made. Knows no field names, no limits of a model, no HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from inferd.server.errors import table as errors
from inferd.server.text.pieces import pieces

Schema = dict[str, Any]
"""JSON Schema (draft 2020-12) of a value."""


class Kind(Protocol):
    """A rule for one value."""

    @property
    def name(self) -> str:
        """As in "expected {name}, but got a string instead"."""
        ...

    def accepts(self, value: object) -> bool:
        """Whether the JSON type is right, before any bound is looked at."""
        ...

    def read(self, value: object, where: str) -> object:
        """The value in our types. Raises `RequestError`; `where` is its path, such as "messages[0].role"."""
        ...

    def schema(self) -> Schema:
        """What `read` takes, with its bounds; null, which stands for "not given", is left out."""
        ...


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number, as JSON schema has it: `1.0` is one, `true` and `1.5` are none."""

    low: int | None = None
    high: int | None = None
    name: str = "an integer"
    also: tuple[int, ...] = ()
    """Values outside of the bounds that mean something of their own."""

    def accepts(self, value: object) -> bool:
        return type(value) is int or (type(value) is float and value.is_integer())

    def read(self, value: object, where: str) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise errors.invalid_type(where, self.name, value)
        if value in self.also:
            return value
        if self.low is not None and value < self.low:
            raise errors.below_min(where, self.low, value)
        if self.high is not None and value > self.high:
            raise errors.above_max(where, self.high, value)
        return value

    def schema(self) -> Schema:
        bounded = _schema("integer", minimum=self.low, maximum=self.high)
        return {"anyOf": [bounded, {"enum": list(self.also)}]} if self.also else bounded


@dataclass(frozen=True, slots=True)
class Decimal:
    """A finite number, whole or not."""

    low: float
    high: float
    name: str = "a decimal number"

    def accepts(self, value: object) -> bool:
        return type(value) in (int, float)

    def read(self, value: object, where: str) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise errors.invalid_type(where, self.name, value)
        if isinstance(value, float) and math.isnan(value):
            raise errors.invalid_value(where, value, "Expected a finite number.")
        # Compared before it is converted: a whole number of 400 digits is no float.
        if value < self.low:
            raise errors.below_min(where, float(self.low), value)
        if value > self.high:
            raise errors.above_max(where, float(self.high), value)
        return float(value)

    def schema(self) -> Schema:
        return _schema("number", minimum=self.low, maximum=self.high)


@dataclass(frozen=True, slots=True)
class Boolean:
    name: str = "a boolean"

    def accepts(self, value: object) -> bool:
        return isinstance(value, bool)

    def read(self, value: object, where: str) -> bool:
        if not isinstance(value, bool):
            raise errors.invalid_type(where, self.name, value)
        return value

    def schema(self) -> Schema:
        return _schema("boolean")


@dataclass(frozen=True, slots=True)
class Text:
    """A string; lengths are in characters."""

    min_length: int = 0
    max_length: int | None = None
    name: str = "a string"

    def accepts(self, value: object) -> bool:
        return isinstance(value, str)

    def read(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise errors.invalid_type(where, self.name, value)
        if len(value) < self.min_length:
            raise errors.empty_string(where)
        if self.max_length is not None and len(value) > self.max_length:
            raise errors.string_too_long(where, self.max_length, len(value))
        return value

    def schema(self) -> Schema:
        return _schema("string", minLength=self.min_length or None, maxLength=self.max_length)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few strings."""

    values: tuple[str, ...]
    name: str = "a string"

    def accepts(self, value: object) -> bool:
        return isinstance(value, str)

    def read(self, value: object, where: str) -> str:
        if not isinstance(value, str):
            raise errors.invalid_type(where, self.name, value)
        if value not in self.values:
            raise errors.not_among(where, value, self.values)
        return value

    def schema(self) -> Schema:
        return _schema("string", enum=list(self.values))


@dataclass(frozen=True, slots=True)
class Array:
    """A list of one kind; read as a tuple."""

    item: Kind
    min_length: int = 0
    max_length: int | None = None

    @property
    def name(self) -> str:
        return "an array of " + self.item.name.removeprefix("an ").removeprefix("a ") + "s"

    def accepts(self, value: object) -> bool:
        """Only the first item tells a list of texts from a list of ids; each one is checked when read."""
        return isinstance(value, list) and (not value or self.item.accepts(value[0]))

    def read(self, value: object, where: str) -> tuple[object, ...]:
        check_array(value, where, self.name, self.min_length, self.max_length)
        assert isinstance(value, list)
        return tuple(self.item.read(item, f"{where}[{i}]") for i, item in enumerate(value))

    def schema(self) -> Schema:
        bounds = {"minItems": self.min_length or None, "maxItems": self.max_length}
        return _schema("array", items=self.item.schema(), **bounds)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of token ids, checked at C speed; the embedding's bound is known only later."""

    min_length: int = 0
    max_length: int | None = None
    name: str = "an array of integers"

    def accepts(self, value: object) -> bool:
        return isinstance(value, list) and (not value or Integer().accepts(value[0]))

    def read(self, value: object, where: str) -> tuple[int, ...]:
        check_array(value, where, self.name, self.min_length, self.max_length)
        assert isinstance(value, list)
        if any(set(map(type, piece)) - {int} for piece in pieces(value)):
            return tuple(Integer().read(item, f"{where}[{i}]") for i, item in enumerate(value))
        return tuple(value)

    def schema(self) -> Schema:
        bounds = {"minItems": self.min_length or None, "maxItems": self.max_length}
        return _schema("array", items=_schema("integer", minimum=0), **bounds)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """The first kind whose JSON type fits reads the value."""

    kinds: tuple[Kind, ...]

    @property
    def name(self) -> str:
        names = [kind.name for kind in self.kinds]
        return f"one of {', '.join(names[:-1])} or {names[-1]}"

    def accepts(self, value: object) -> bool:
        return any(kind.accepts(value) for kind in self.kinds)

    def read(self, value: object, where: str) -> object:
        for kind in self.kinds:
            if kind.accepts(value):
                return kind.read(value, where)
        raise errors.invalid_type(where, self.name, value)

    def schema(self) -> Schema:
        return {"anyOf": [kind.schema() for kind in self.kinds]}


@dataclass(frozen=True, slots=True)
class OneOrMany:
    """A value, or a list of such values; read as a tuple."""

    item: Kind
    max_length: int

    @property
    def name(self) -> str:
        return f"one of {self.item.name} or {Array(self.item).name}"

    def accepts(self, value: object) -> bool:
        return isinstance(value, list) or self.item.accepts(value)

    def read(self, value: object, where: str) -> tuple[object, ...]:
        if isinstance(value, list):
            return Array(self.item, max_length=self.max_length).read(value, where)
        if not self.item.accepts(value):
            raise errors.invalid_type(where, self.name, value)
        return (self.item.read(value, where),)

    def schema(self) -> Schema:
        return {"anyOf": [self.item.schema(), Array(self.item, max_length=self.max_length).schema()]}


@dataclass(frozen=True, slots=True)
class Json:
    """An object that is passed on as it is."""

    max_properties: int | None = None
    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> dict[str, object]:
        if not isinstance(value, dict):
            raise errors.invalid_type(where, self.name, value)
        if self.max_properties is not None and len(value) > self.max_properties:
            raise errors.too_many_properties(where, self.max_properties, len(value))
        return value

    def schema(self) -> Schema:
        return _schema("object", maxProperties=self.max_properties)


@dataclass(frozen=True, slots=True)
class Only:
    """A parameter of which only these values are served; anything else is refused as a value, not as a type."""

    values: tuple[object, ...]
    rule: str
    name: str = "a supported value"

    def accepts(self, value: object) -> bool:
        return True

    def read(self, value: object, where: str) -> object:
        if not any(_is_same(value, known) for known in self.values):
            raise errors.unsupported_value(where, value, self.rule)
        return value

    def schema(self) -> Schema:
        return {"enum": list(self.values)}


@dataclass(frozen=True, slots=True)
class Anything:
    """A value that nothing is made of; the body's own bounds hold."""

    name: str = "any value"

    def accepts(self, value: object) -> bool:
        return True

    def read(self, value: object, where: str) -> object:
        return value

    def schema(self) -> Schema:
        return {}


@dataclass(frozen=True, slots=True)
class OrNotGiven:
    """A kind, and values that clients send for "not given": such a one is read as None, as null is."""

    kind: Kind
    unset_values: tuple[object, ...]

    @property
    def name(self) -> str:
        return self.kind.name

    def accepts(self, value: object) -> bool:
        return self.kind.accepts(value)

    def read(self, value: object, where: str) -> object:
        return None if any(_is_same(value, unset) for unset in self.unset_values) else self.kind.read(value, where)

    def schema(self) -> Schema:
        return {"anyOf": [self.kind.schema(), {"enum": list(self.unset_values)}]}


def _is_same(value: object, known: object) -> bool:
    """Whether they are one JSON value: 1 and 1.0 are, 1 and true are not."""
    return isinstance(value, bool) == isinstance(known, bool) and value == known


def check_array(value: object, where: str, name: str, min_length: int, max_length: int | None) -> None:
    if not isinstance(value, list):
        raise errors.invalid_type(where, name, value)
    if len(value) < min_length:
        raise errors.empty_array(where, min_length)
    if max_length is not None and len(value) > max_length:
        raise errors.array_too_long(where, max_length, len(value))


_ignored: ContextVar[list[str] | None] = ContextVar("ignored", default=None)
"""Where `check_properties` collects the paths of unknown keys; None: it refuses them."""


@contextmanager
def ignoring_unknown(paths: list[str] | None) -> Iterator[None]:
    """Within it, unknown keys are left out and their paths are added to `paths`; None: they are refused."""
    token = _ignored.set(paths)
    try:
        yield
    finally:
        _ignored.reset(token)


def check_properties(
    value: object,
    where: str,
    required: Collection[str],
    optional: Collection[str],
    without_effect: Collection[str] = (),
) -> Mapping[str, object]:
    """An object with these keys and no others; those `without_effect` are left out of what is returned.

    Raises `RequestError` for the first key missing or, but for `ignoring_unknown`, unknown.
    """
    if not isinstance(value, dict):
        raise errors.invalid_type(where, "an object", value)
    dropped = [key for key in value if key not in required and key not in optional]
    unknown = [f"{where}.{key}" for key in dropped if key not in without_effect]
    if unknown:
        ignored = _ignored.get()
        if ignored is None:
            raise errors.unknown_parameter(unknown[0], None)
        ignored += unknown
    for key in required:
        if value.get(key) is None:
            raise errors.missing(f"{where}.{key}")
    return {key: item for key, item in value.items() if key not in dropped} if dropped else value


def object_schema(
    properties: Mapping[str, Schema], required: Collection[str] = (), without_effect: Collection[str] = ()
) -> Schema:
    """An object with these keys and no others, as `check_properties` takes it: null is "not given"."""
    told = {name: schema if name in required else or_null(schema) for name, schema in properties.items()}
    told |= {name: {} for name in without_effect}
    named: Schema = {"type": "object", "properties": told, "additionalProperties": False}
    return {**named, "required": list(required)} if required else named


def or_null(schema: Schema) -> Schema:
    """JSON null stands for "not given" where a value need not be."""
    if not schema or "null" in schema.get("type", ()) or None in schema.get("enum", ()):
        return schema
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    options = schema["anyOf"] if set(schema) == {"anyOf"} else [schema]
    return {"anyOf": [*options, {"type": "null"}]}


def _schema(json_type: str, **rules: object) -> Schema:
    return {"type": json_type, **{name: rule for name, rule in rules.items() if rule is not None}}
