"""Schemas as data: a `Shape` for each type of value, alternatives of shapes, and references.

`intersect` finds what two schemas allow together, as `allOf` and keywords beside `$ref` ask. Knows neither the keywords
of JSON Schema nor grammars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol

_MOST_STEPS = 30_000
"""Most intersections for one schema, which take 0.1 s. Alternatives multiply."""
_MOST_LEVELS = 128
"""Most intersections within each other."""
_MOST_STEP_BITS = 4_096
"""Most bits of the least common multiple of several numbers, each of which has 1,024 at most."""


class SchemaError(Exception):
    """A schema that cannot be compiled; the text says why."""


@dataclass(frozen=True, slots=True)
class Anything:
    """Every value."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """No value."""

    reason: str


@dataclass(frozen=True, slots=True)
class Null:
    pass


@dataclass(frozen=True, slots=True)
class Booleans:
    value: bool | None = None
    """None: both."""


@dataclass(frozen=True, slots=True)
class Numbers:
    low: Fraction | None = None
    high: Fraction | None = None
    low_open: bool = False
    """Whether `low` itself is excluded."""
    high_open: bool = False
    is_whole: bool = False
    step: Fraction | None = None
    """Number whose whole multiples alone are allowed; above 0."""


@dataclass(frozen=True, slots=True)
class Strings:
    min_length: int = 0
    """Characters."""
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    """Expressions, each of which matches a part of the string."""
    formats: tuple[str, ...] = ()
    value: str | None = None
    """The only string that is allowed, if the other rules allow it."""


@dataclass(frozen=True, slots=True)
class Arrays:
    min_items: int = 0
    max_items: int | None = None
    first: tuple[Node, ...] = ()
    """Schemas of the first items."""
    rest: Node = field(default_factory=Anything)


@dataclass(frozen=True, slots=True)
class Objects:
    properties: Mapping[str, Node] = field(default_factory=dict)
    patterns: Mapping[str, Node] = field(default_factory=dict)
    """Schemas of the properties whose names an expression matches; the expressions match no name together."""
    rest: Node = field(default_factory=Anything)
    """Schema of all other properties."""
    required: tuple[str, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    path: str = field(default="", compare=False)
    """Path of the schema, for messages."""


@dataclass(frozen=True, slots=True)
class AnyOf:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Exactly one of these, which may overlap."""

    options: tuple[Node, ...]
    path: str = field(default="", compare=False)
    """Path of the keyword, for messages."""


@dataclass(frozen=True, slots=True)
class Reference:
    pointer: str
    """As the schema writes it."""


Shape = Null | Booleans | Numbers | Strings | Arrays | Objects
Node = Anything | Nothing | Shape | AnyOf | OneOf | Reference


class Names(Protocol):
    """Questions about names and patterns that the intersection of objects asks."""

    def matches(self, pattern: str, name: str) -> bool: ...

    def check_apart(self, patterns: Sequence[str]) -> None:
        """Raises `SchemaError` if two patterns may match one name."""
        ...


def any_of(options: Sequence[Node]) -> Node:
    """One of the options, without those that allow nothing."""
    found: list[Node] = []
    for option in options:
        match option:
            case Anything():
                return option
            case Nothing():
                pass
            case AnyOf():
                found.extend(option.options)
            case _:
                found.append(option)
    if not found:
        return next(iter(options), Nothing("it lists no alternative"))
    return found[0] if len(found) == 1 else AnyOf(tuple(found))


class Intersections:
    """Intersects the nodes of one schema."""

    def __init__(self, names: Names, resolve: Resolver) -> None:
        self._names, self._resolve = names, resolve
        self._num_steps = self._level = 0

    def step(self) -> None:
        """Count one step. Raises `SchemaError` beyond the most allowed."""
        self._num_steps += 1
        if self._num_steps > _MOST_STEPS:
            raise SchemaError(f"it takes more than {_MOST_STEPS} steps to combine its alternatives")

    def one_of(self, options: Sequence[Node], path: str) -> Node:
        """Exactly one of the options: `AnyOf` if no value is in two of them."""
        found: list[Node] = []
        for option in options:
            if isinstance(option, OneOf):
                found.extend(option.options)
            elif not isinstance(option, Nothing):
                found.append(option)
        if not found:
            return next(iter(options), Nothing("it lists no alternative"))
        if len(found) == 1:
            return found[0]
        for i, option in enumerate(found):
            if not all(self._are_apart(option, other) for other in found[i + 1 :]):
                return OneOf(tuple(found), path)
        return AnyOf(tuple(found))

    def intersect(self, one: Node, other: Node) -> Node:
        self.step()
        self._level += 1
        if self._level > _MOST_LEVELS:
            raise SchemaError(f"it combines more than {_MOST_LEVELS} levels of schemas")
        try:
            return self._intersection(one, other)
        finally:
            self._level -= 1

    def _intersection(self, one: Node, other: Node) -> Node:
        match one, other:
            case (Anything(), _) | (_, Nothing()):
                return other
            case (_, Anything()) | (Nothing(), _):
                return one
            case Reference(), _:
                return self.intersect(self._resolve(one.pointer), other)
            case _, Reference():
                return self.intersect(one, self._resolve(other.pointer))
            case OneOf(), _:
                return self.one_of([self.intersect(option, other) for option in one.options], one.path)
            case _, OneOf():
                return self.one_of([self.intersect(one, option) for option in other.options], other.path)
            case AnyOf(), _:
                return any_of([self.intersect(option, other) for option in one.options])
            case _, AnyOf():
                return any_of([self.intersect(one, option) for option in other.options])
            case Null(), Null():
                return one
            case Booleans(), Booleans():
                if one.value is None or one.value == other.value:
                    return other if one.value is None else one
                return one if other.value is None else Nothing("no boolean is both true and false")
            case Numbers(), Numbers():
                return _numbers(one, other)
            case Strings(), Strings():
                return _strings(one, other)
            case Arrays(), Arrays():
                return self._arrays(one, other)
            case Objects(), Objects():
                return self._objects(one, other)
        return Nothing("it asks for two types of values at once")

    def _arrays(self, one: Arrays, other: Arrays) -> Node:
        num_first = max(len(one.first), len(other.first))
        first = (
            self.intersect(
                one.first[i] if i < len(one.first) else one.rest, other.first[i] if i < len(other.first) else other.rest
            )
            for i in range(num_first)
        )
        return Arrays(
            max(one.min_items, other.min_items),
            _least(one.max_items, other.max_items),
            tuple(first),
            self.intersect(one.rest, other.rest),
        )

    def _objects(self, one: Objects, other: Objects) -> Node:
        properties = {
            name: self.intersect(schema, self.property_of(other, name)) for name, schema in one.properties.items()
        }
        for name, schema in other.properties.items():
            if name not in properties:
                properties[name] = self.intersect(self.property_of(one, name), schema)
        patterns = {
            pattern: self.intersect(schema, other.patterns.get(pattern, other.rest))
            for pattern, schema in one.patterns.items()
        }
        for pattern, schema in other.patterns.items():
            if pattern not in patterns:
                patterns[pattern] = self.intersect(one.rest, schema)
        self._names.check_apart(list(patterns))
        return checked_object(
            Objects(
                properties,
                patterns,
                self.intersect(one.rest, other.rest),
                tuple(dict.fromkeys((*one.required, *other.required))),
                max(one.min_properties, other.min_properties),
                _least(one.max_properties, other.max_properties),
                one.path or other.path,
            )
        )

    def property_of(self, schema: Objects, name: str) -> Node:
        """The schema of one property."""
        if name in schema.properties:
            return schema.properties[name]
        for pattern, inner in schema.patterns.items():
            if self._names.matches(pattern, name):
                return inner
        return schema.rest

    def _are_apart(self, one: Node, other: Node) -> bool:
        """Whether it is certain that no value is in both."""
        match one, other:
            case (Nothing(), _) | (_, Nothing()):
                return True
            case (Anything() | Reference(), _) | (_, Anything() | Reference()):
                return False
            case ((AnyOf() | OneOf()), _):
                return all(self._are_apart(option, other) for option in one.options)
            case _, (AnyOf() | OneOf()):
                return all(self._are_apart(one, option) for option in other.options)
            case Booleans(), Booleans():
                return None not in (one.value, other.value) and one.value != other.value
            case Strings(), Strings():
                return None not in (one.value, other.value) and one.value != other.value
            case Numbers(), Numbers():
                return is_empty(_numbers(one, other))
            case Objects(), Objects():
                return any(
                    self._are_apart(self.property_of(one, name), self.property_of(other, name))
                    for name in (*one.required, *other.required)
                )
        return type(one) is not type(other)


class Resolver(Protocol):
    def __call__(self, pointer: str) -> Node:
        """The node of a reference. Raises `SchemaError`."""
        ...


def checked_object(schema: Objects) -> Node:
    """The schema, or `Nothing` if no object has so many properties."""
    if schema.max_properties is not None:
        if schema.min_properties > schema.max_properties:
            return Nothing("minProperties is above maxProperties")
        if len(schema.required) > schema.max_properties:
            return Nothing("it requires more properties than maxProperties allows")
    return schema


def is_empty(schema: Numbers) -> bool:
    """Whether the bounds exclude each other."""
    if schema.low is None or schema.high is None:
        return False
    return schema.low > schema.high or (schema.low == schema.high and (schema.low_open or schema.high_open))


def _numbers(one: Numbers, other: Numbers) -> Numbers:
    low, low_open = max(
        ((schema.low, schema.low_open) for schema in (one, other) if schema.low is not None), default=(None, False)
    )
    high, high_open = min(
        ((schema.high, not schema.high_open) for schema in (one, other) if schema.high is not None),
        default=(None, True),
    )
    steps = [schema.step for schema in (one, other) if schema.step is not None]
    step = None if not steps else _common_multiple(steps[0], steps[-1])
    return Numbers(low, high, low_open, not high_open, one.is_whole or other.is_whole, step)


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    found = Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))
    if found.numerator.bit_length() > _MOST_STEP_BITS:
        raise SchemaError("the least number that is a multiple of all is too large")
    return found


def _strings(one: Strings, other: Strings) -> Node:
    if None not in (one.value, other.value) and one.value != other.value:
        return Nothing("no string has two values")
    return replace(
        one,
        min_length=max(one.min_length, other.min_length),
        max_length=_least(one.max_length, other.max_length),
        patterns=tuple(dict.fromkeys((*one.patterns, *other.patterns))),
        formats=tuple(dict.fromkeys((*one.formats, *other.formats))),
        value=other.value if one.value is None else one.value,
    )


def _least(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)
