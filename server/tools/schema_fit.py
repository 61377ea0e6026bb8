"""Whether the arguments of a call fit the schema of its tool, in bounded time.

Checks types, names, numbers and combinations. `pattern` and `format` are not checked: a regular expression of a caller
may take any time. Knows no calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

MAX_STEPS = 4_000
"""Comparisons of a value with a schema. Arguments that need more do not fit."""
_ITEMS_PER_STEP = 16
"""Items of a list in a schema, or characters of a reference, that count as one comparison."""


class _TooManyStepsError(Exception):
    pass


def fits(value: object, schema: object) -> bool:
    """Whether JSON fits a JSON schema. A reference that leads nowhere allows nothing."""
    return Check(schema).fits(value, schema)


_TYPES: Mapping[str, Callable[[object], bool]] = {
    "object": lambda value: isinstance(value, Mapping),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "integer": lambda value: (
        not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
_NUMBERS: Mapping[str, Callable[[float, float], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
_SIZES: Mapping[str, tuple[type[object], Callable[[int, int], bool]]] = {
    "minLength": (str, lambda size, bound: size >= bound),
    "maxLength": (str, lambda size, bound: size <= bound),
    "minItems": (list, lambda size, bound: size >= bound),
    "maxItems": (list, lambda size, bound: size <= bound),
}


class Check:
    """Compares values with schemas, and counts the steps of all of them."""

    def __init__(self, root: object) -> None:
        """`root`: the schema in which references lead to a schema."""
        self._root = root
        self._num_steps = 0

    def fits(self, value: object, schema: object) -> bool:
        """Whether JSON fits a schema inside the root; False without steps left."""
        try:
            return self._fits(value, schema, 0)
        except (_TooManyStepsError, RecursionError):
            return False

    def _fits(self, value: object, schema: object, depth: int) -> bool:
        self._count(_ITEMS_PER_STEP)
        if depth > 128:
            raise _TooManyStepsError
        if not isinstance(schema, Mapping):
            return schema is not False
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._fits(value, self._named(reference), depth + 1):
            return False
        return (
            self._has_type(value, schema)
            and self._has_value(value, schema)
            and self._combines(value, schema, depth)
            and self._has_size(value, schema)
            and (not isinstance(value, Mapping) or self._has_properties(value, schema, depth))
            and (not isinstance(value, list) or self._has_items(value, schema, depth))
        )

    def _count(self, num_items: int) -> None:
        self._num_steps += num_items // _ITEMS_PER_STEP
        if self._num_steps > MAX_STEPS:
            raise _TooManyStepsError

    def _named(self, reference: str) -> object:
        """The schema at a reference inside this one, such as `#/$defs/city`; False if there is none."""
        self._count(len(reference))
        at: object = self._root
        for key in reference.removeprefix("#").split("/")[1:] if reference.startswith("#") else ("",):
            name = key.replace("~1", "/").replace("~0", "~")
            at = at.get(name, False) if isinstance(at, Mapping) else False
        return at

    def _has_type(self, value: object, schema: Mapping[str, object]) -> bool:
        given = schema.get("type")
        names = [given] if isinstance(given, str) else given
        if not isinstance(names, Sequence) or (value is None and schema.get("nullable") is True):
            return True
        self._count(len(names))
        known = [_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES]
        return not known or any(is_type(value) for is_type in known)

    def _has_value(self, value: object, schema: Mapping[str, object]) -> bool:
        listed = schema.get("enum")
        if isinstance(listed, list):
            self._count(len(listed))
            if not any(_equal(value, one) for one in listed):
                return False
        return "const" not in schema or _equal(value, schema["const"])

    def _combines(self, value: object, schema: Mapping[str, object], depth: int) -> bool:
        for name, is_enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            parts = schema.get(name)
            if isinstance(parts, list) and parts and not is_enough(self._fits(value, one, depth + 1) for one in parts):
                return False
        return True

    def _has_size(self, value: object, schema: Mapping[str, object]) -> bool:
        for name, (kind, holds) in _SIZES.items():
            bound = schema.get(name)
            if isinstance(bound, int) and isinstance(value, kind) and not holds(len(value), bound):  # type: ignore[arg-type]
                return False
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        bounds = [(is_in, schema[name]) for name, is_in in _NUMBERS.items() if name in schema]
        return all(is_in(value, bound) for is_in, bound in bounds if _TYPES["number"](bound))  # type: ignore[arg-type]

    def _has_properties(self, value: Mapping[str, object], schema: Mapping[str, object], depth: int) -> bool:
        required, known = schema.get("required"), schema.get("properties")
        self._count(len(required) if isinstance(required, list) else 0)
        if isinstance(required, list) and any(name not in value for name in required if isinstance(name, str)):
            return False
        properties = known if isinstance(known, Mapping) else {}
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(self._fits(part, properties.get(name, others), depth + 1) for name, part in value.items())

    def _has_items(self, value: list[object], schema: Mapping[str, object], depth: int) -> bool:
        items = schema.get("items", True)
        firsts = schema.get("prefixItems")
        schemas = firsts if isinstance(firsts, list) else []
        return all(
            self._fits(part, schemas[i] if i < len(schemas) else items, depth + 1) for i, part in enumerate(value)
        )


def _equal(value: object, other: object) -> bool:
    """Equality of JSON: Python's `True == 1` is none."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
