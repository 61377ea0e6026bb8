"""Types of values in the models of requests, as annotations for pydantic. Knows no particular field."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic import StrictBool as Flag
from pydantic import StrictFloat as Number
from pydantic import StrictInt as Whole
from pydantic import StrictStr as Text
from pydantic_core import CoreSchema, core_schema

from inferd.engine.api.errors import RequestError
from inferd.server.errors import messages as errors
from inferd.server.errors import validation
from inferd.server.schema.request_model import Part, Row, key_of

__all__ = [
    "Besides", "Converted", "Flag", "JsonObject", "Many", "Number", "Only", "ReadBy", "Telling", "Text", "Whole",
    "form",
]  # fmt: skip

JsonObject = dict[str, object]


@dataclass(eq=False, frozen=True, slots=True)
class Many:
    """Bounds of a list, which becomes a tuple. Its length is checked before any item; the first wrong item ends it."""

    min_length: int = 0
    max_length: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        (item, *_) = get_args(source)
        schema = core_schema.list_schema(
            handler.generate_schema(item),
            min_length=self.min_length or None,
            max_length=self.max_length,
            fail_fast=True,
        )
        checked = core_schema.no_info_before_validator_function(self._check_length, schema)
        return core_schema.no_info_after_validator_function(tuple, checked)

    def _check_length(self, value: object) -> object:
        if isinstance(value, list) and self.max_length is not None and len(value) > self.max_length:
            raise validation.too_long(self.max_length)
        return value


@dataclass(eq=False, frozen=True, slots=True)
class Only:
    """A parameter of which only these values are served; any other is refused as a value, not as a type."""

    values: tuple[object, ...]
    rule: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        del source, handler
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del schema, handler
        return {"enum": list(self.values)}

    def _check(self, value: object) -> object:
        if not any(_is_same(value, known) for known in self.values):
            raise validation.unsupported_value(self.rule)
        return value


def _is_same(value: object, known: object) -> bool:
    """Whether both are one JSON value: 1 and 1.0 are, 1 and true are not."""
    return isinstance(value, bool) == isinstance(known, bool) and value == known


@dataclass(eq=False, frozen=True, slots=True)
class AsGiven:
    """An object that is checked, and passed on as the client wrote it, nulls included, but without further keys."""

    sent: type[Part]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._read, handler.generate_schema(self.sent))

    def _read(self, value: Any, read: Callable[[object], object]) -> dict[str, object]:
        read(value)
        return _kept(self.sent, value)


def _kept(model: type[Part], value: Mapping[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for key, item in value.items():
        if key in model.names:
            part = model.parts.get(key)
            kept[key] = _kept(part, item) if part is not None and isinstance(item, dict) else item
    return kept


@dataclass(eq=False, frozen=True, slots=True)
class Besides:
    """A value outside of the bounds that is taken too, and read as `meaning`."""

    value: int
    meaning: int | None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"enum": [self.value]}]}

    def _read(self, value: object, read: Callable[[object], object]) -> object:
        return self.meaning if type(value) is int and value == self.value else read(value)


@dataclass(eq=False, frozen=True, slots=True)
class Converted:
    """The client sends a value of the type `sent`, and the model holds what `convert` makes of it and of the field's
    name.

    `convert` may raise `RequestError`.
    """

    sent: Any
    convert: Callable[[Any, str], object]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(
            _refusing(self.convert), handler.generate_schema(self.sent)
        )


@dataclass(eq=False, frozen=True, slots=True)
class Kept:
    """As `Converted`, with a `convert` that is also given the value as the client wrote it, before the other two."""

    sent: Any
    convert: Callable[[Any, Any, str], object]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_wrap_validator_function(self._read, handler.generate_schema(self.sent))

    def _read(self, value: object, read: Callable[[object], object], info: ValidationInfo) -> object:
        checked = read(value)
        return _refusing(lambda made, where: self.convert(value, made, where))(checked, info)


@dataclass(eq=False, frozen=True, slots=True)
class Telling:
    """As `Converted`, with a `convert` that is given the validator's `info`, so that it may tell notices and read the
    fields before."""

    sent: Any
    convert: Callable[[Any, ValidationInfo], object]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._read, handler.generate_schema(self.sent))

    def _read(self, value: object, info: ValidationInfo) -> object:
        try:
            return self.convert(value, info)
        except RequestError as error:
            raise validation.refused(error) from None


@dataclass(eq=False, frozen=True, slots=True)
class ReadBy:
    """A value that `read` checks and converts, given the field's name: long lists, in slices.

    pydantic holds the interpreter lock while it checks a list, but not while it calls Python. `sent` is what the
    documentation says of the value. `read` may raise `RequestError`.
    """

    read: Callable[[Any, str], object]
    sent: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            _refusing(self.read), json_schema_input_schema=handler.generate_schema(self.sent)
        )


def _refusing(read: Callable[[Any, str], object]) -> Callable[[Any, ValidationInfo], object]:
    """`read` as a validator. pydantic reports its refusals in the order of the fields."""

    def validate(value: Any, info: ValidationInfo) -> object:
        try:
            return read(value, info.field_name or "")
        except RequestError as error:
            raise validation.refused(error) from None

    return validate


def by_type(value: object) -> str | None:
    """The tag of an object in a union: its `type`."""
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if isinstance(kind, str) else None


@dataclass(eq=False, frozen=True, slots=True)
class Matching:
    """A string that all of `pattern` matches; `rule` says so in words."""

    pattern: str
    rule: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "pattern": f"^{self.pattern}$"}

    def _check(self, value: str) -> str:
        if not re.fullmatch(self.pattern, value):
            raise validation.invalid_value(self.rule)
        return value


@dataclass(eq=False, frozen=True, slots=True)
class Typed:
    """An object whose `type` is one of `types`; see `form`. `is_optional`: it may have none."""

    types: Sequence[str]
    rule: str = ""
    is_optional: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        is_missing = self.is_optional and kind is None and isinstance(value, dict)
        if not is_missing and not (isinstance(kind, str) and kind in self.types):
            raise validation.wrong_form("an object", self.types, self.rule)
        return value


def type_of(value: JsonObject) -> object:
    """The key `type` of an object."""
    return value.get("type")


def union_of(
    rows: Mapping[str, Row],
    types: Mapping[str, Any],
    *,
    name_of: Callable[[JsonObject], object] = type_of,
    rule: str = "",
) -> Any:
    """A union of objects by their `type`, which has a row. `types`: what each is read as. A demand without a type is
    refused by name, with its way out.

    `name_of`: gives the type of an object, also of one that names none. `rule`: says what to do about an unknown type.
    """
    assert {key for key, row in rows.items() if row.kind != "demand"} <= set(types) <= set(rows)

    def key(value: object) -> str | None:
        name = name_of(value) if isinstance(value, dict) else None
        return key_of(rows, name) if isinstance(name, str) else None

    def check(value: object) -> object:
        found = key(value)
        if found is not None and found not in types:
            assert isinstance(value, dict)
            raise validation.unsupported_type(value["type"], rows[found].about)
        return value

    def tag_of(value: object) -> str | None:
        found = key(value)
        return None if found is None else f"<{found}>"

    members: Any = functools.reduce(operator.or_, (Annotated[kind, Tag(f"<{name}>")] for name, kind in types.items()))
    return Annotated[members, form("an object", tag_of, tuple(types), rule), BeforeValidator(check)]


def typed_object(*types: str) -> Any:
    """Any object, whose `type` is one of `types`; one that ends in `*` begins the type."""
    patterns = "|".join(re.escape(kind).replace(r"\*", ".*") for kind in types)
    schema = {"type": "object", "properties": {"type": {"type": "string", "pattern": f"^({patterns})$"}}}
    return Annotated[JsonObject, WithJsonSchema({**schema, "required": ["type"]})]


class _Form(Discriminator):
    """Hashable, as members of unions must be."""

    __hash__ = object.__hash__


def form(
    expected: str, tag_of: Callable[[Any], str | None], types: Sequence[str] = (), rule: str = ""
) -> Discriminator:
    """Chooses the member of a union by `tag_of` the value; None: no member takes it.

    `expected`: as in "expected a string, but got an integer instead". `types`: what the key `type` of an object may be,
    if the union has objects. A tag is written `<so>`: it is no part of a path.
    """
    return _Form(
        tag_of,
        custom_error_type="wrong_form",
        custom_error_message="The value has a wrong form.",
        custom_error_context={"expected": expected, "types": " ".join(types), "rule": rule},
    )


def check_number(value: object, where: str, low: float, high: float) -> float:
    """A number that pydantic does not check. Raises `RequestError`."""
    if type(value) is not int and type(value) is not float:
        raise errors.invalid_type(where, "a decimal number", value)
    if value != value:
        raise errors.invalid_value(where, value, "Expected a finite number.")
    # Compared before it is converted: a whole number of 400 digits is no float.
    if value < low:
        raise errors.below_min(where, float(low), value)
    if value > high:
        raise errors.above_max(where, float(high), value)
    return float(value)
