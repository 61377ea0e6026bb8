"""Makes JSON schemas from seeds, with every keyword that is enforced, and judges the outputs written under them.

The judge is `jsonschema`, which shares no code with the grammar that constrains the output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]

_WORDS = (
    "name",
    "age",
    "city",
    "tags",
    "items",
    "id",
    "note",
    "unit",
    "größe",
    "a b",
    'q"t',
    "x/y",
    "<tool_call>",
    "東京",
)
_PATTERNS = (
    "^[a-z]{2,5}$", r"^\d{3}-\d{4}$", "^(foo|bar)+$", "^[A-Z][a-z]*( [A-Z][a-z]*)?$", "^a+b?$", r"^[^\s]{1,4}$",
    "^(0|[1-9][0-9]{0,2})%$",
)  # fmt: skip
_FORMATS = ("date", "ipv4", "ipv6", "uuid", "email", "date-time", "time")
_ENUMS = (["a", "b", "c"], [1, 2, 3], ["on", None, False], [1.5, "x", {"k": [1]}], ["", " ", "\n", "ä", "😀"])
UNENFORCED: tuple[Mapping[str, Any], ...] = (
    {"uniqueItems": True}, {"not": {"const": 3}}, {"propertyNames": {"pattern": "^z"}}, {"contains": {"const": 1}},
    {"if": {"type": "string"}, "then": {"minLength": 50}}, {"format": "regex"}, {"unevaluatedProperties": False},
)  # fmt: skip
"""Keywords that a lenient reading leaves to the model."""


def make_schema(seed: int) -> Schema:
    """The schema of `seed`: an object in most cases, with definitions that refer to one another in some."""
    rng = Random(seed)
    maker = _Maker(rng)
    schema = maker.object(0) if rng.random() < 0.8 else maker.any(0)
    return {**schema, "$defs": maker.definitions} if maker.definitions else schema


def with_unenforced(schema: Schema, seed: int) -> Schema:
    """The schema with some keywords added that cannot be enforced."""
    rng = Random(seed)

    def visit(node: Schema) -> Schema:
        changed = dict(node)
        for name in ("properties", "$defs"):
            if name in node:
                changed[name] = {key: visit(value) for key, value in node[name].items()}
        if isinstance(node.get("items"), dict):
            changed["items"] = visit(node["items"])
        if "type" in node and "format" not in node and rng.random() < 0.5:
            changed.update(rng.choice(UNENFORCED))
        return changed

    return {**visit(schema), **rng.choice(UNENFORCED)}


def errors_of(value: object, schema: Schema) -> list[str]:
    """Errors of a value under a schema, formats included."""
    validator = Draft202012Validator(schema, format_checker=_FORMAT_CHECKER)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(value)]


_FORMAT_CHECKER = FormatChecker(formats=())
_SHAPES = {
    "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]\d\d:\d\d)",
    "ipv4": r"((25[0-5]|2[0-4]\d|1?\d?\d)(\.(?!$)|$)){4}",
    "ipv6": r"[0-9a-fA-F:.]{2,45}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[^@]+@[^@]+",
}
_SHAPES["date-time"] = f"{_SHAPES['date']}[Tt ]{_SHAPES['time']}"


def _checks(shape: str) -> Callable[[object], bool]:
    return lambda value: not isinstance(value, str) or re.fullmatch(shape, value) is not None


for _name, _shape in _SHAPES.items():
    _FORMAT_CHECKER.checks(_name)(_checks(_shape))


class _Maker:
    """Makes one schema, with its definitions."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.definitions: dict[str, Schema] = {}

    def any(self, depth: int) -> Schema:
        rng = self._rng
        simple = (self.string, self.integer, self.number, self.other, self.enum)
        deep = (self.object, self.array, self.choice, self.reference, self.both)
        kind = rng.choice(simple if depth >= 3 or rng.random() < 0.5 else deep)
        return kind(depth)

    def string(self, depth: int) -> Schema:
        rng = self._rng
        form = rng.randrange(4)
        if form == 0:
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        if form == 1:
            return {"type": "string", "format": rng.choice(_FORMATS)}
        low = rng.choice((0, 0, 1, 5))
        bounds = {"minLength": low, "maxLength": low + rng.choice((0, 3, 20))}
        return {"type": "string", **bounds}

    def integer(self, depth: int) -> Schema:
        rng = self._rng
        low = rng.choice((-1_000, -7, 0, 1, 95, 10**12))
        form = rng.randrange(4)
        if form == 0:
            return {"type": "integer", "multipleOf": rng.choice((2, 5, 7, 10))}
        if form == 1:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.choice((2, 11, 10**6))}
        return {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 1, 10, 12_345))}

    def number(self, depth: int) -> Schema:
        rng = self._rng
        low = rng.choice((-2.5, 0, 0.125, 10, 99.5))
        if rng.random() < 0.3:
            return {"type": "number"}
        return {
            "type": "number",
            rng.choice(("minimum", "exclusiveMinimum")): low,
            "maximum": low + rng.choice((1, 0.5, 100)),
        }

    def other(self, depth: int) -> Schema:
        rng = self._rng
        return rng.choice(
            ({"type": "boolean"}, {"type": "null"}, {"const": rng.choice(("<|im_end|>", 7, None, [1, {}]))})
        )

    def enum(self, depth: int) -> Schema:
        return {"enum": self._rng.choice(_ENUMS), "title": "One of a few"}

    def array(self, depth: int) -> Schema:
        rng = self._rng
        low = rng.choice((0, 0, 1, 2))
        bounds = {"minItems": low, "maxItems": low + rng.choice((0, 1, 3))}
        if rng.random() < 0.2:
            return {
                "type": "array",
                "prefixItems": [self.any(depth + 1), self.any(depth + 1)],
                "items": False,
                "minItems": 1,
            }
        return {"type": "array", "items": self.any(depth + 1), **bounds}

    def object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(_WORDS, rng.randint(0 if depth else 1, 5))
        required = [name for name in names if rng.random() < 0.7]
        schema: Schema = {"type": "object", "properties": {name: self.any(depth + 1) for name in names}}
        if required or rng.random() < 0.5:
            schema["required"] = required
        if rng.random() < 0.85:
            schema["additionalProperties"] = False
        else:
            # The number of properties is enforced only if all named ones are required.
            schema |= {"additionalProperties": self.any(3), "maxProperties": len(names) + 1, "required": names}
        return schema

    def choice(self, depth: int) -> Schema:
        rng = self._rng
        if rng.random() < 0.3:
            tagged = [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "value": self.any(depth + 1)},
                    "required": ["kind", "value"],
                    "additionalProperties": False,
                }
                for kind in ("p", "q")
            ]
            return {"anyOf": tagged}
        if rng.random() < 0.3:
            return {"type": ["integer", "null", "boolean"], "minimum": 3, "maximum": 9}
        return {"anyOf": [self.any(depth + 1) for _ in range(rng.randint(1, 3))]}

    def both(self, depth: int) -> Schema:
        low = self._rng.randint(0, 50)
        return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + self._rng.choice((0, 9, 999))}]}

    def reference(self, depth: int) -> Schema:
        """A reference to a definition, which in some cases refers to itself."""
        rng = self._rng
        name = f"d{len(self.definitions)}"
        self.definitions[name] = {}
        if rng.random() < 0.5:
            self.definitions[name] = self.any(depth + 1)
        else:
            self.definitions[name] = {
                "type": "object",
                "properties": {
                    "value": self.any(3),
                    "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{name}"}
