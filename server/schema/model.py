"""Base classes and value types of the pydantic models that requests are read into.

`read` makes a model of a parsed JSON object and is the only reader. JSON null means "not given" everywhere. Knows no
particular field.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic import StrictBool as Flag
from pydantic import StrictFloat as Number
from pydantic import StrictInt as Whole
from pydantic import StrictStr as Text
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from inferd.engine.api.errors import RequestError
from inferd.server.errors import table as errors
from inferd.server.errors import validation
from inferd.server.schema.kinds import Kind, ignoring_unknown

__all__ = ["Flag", "JsonObject", "Many", "Number", "Only", "Part", "RequestModel", "Text", "Whole", "option", "read"]

JsonObject = dict[str, object]


def option(about: str, *, unset: str = "", area: str = "", has_effect: bool = True, **bounds: Any) -> Any:
    """A field that may be left out.

    `about`: what it does and what it costs, for the documentation. `unset`: what holds if it is not given. `area`: its
    part of the documentation. `has_effect` false: accepted because clients send it, without any effect. `bounds`: as
    of pydantic's `Field`.
    """
    return Field(default=None, description=about, json_schema_extra=_extra(unset, area, has_effect), **bounds)


def required(about: str, *, area: str = "", **bounds: Any) -> Any:
    """A field that must be given; see `option`."""
    return Field(description=about, json_schema_extra=_extra("", area, True), **bounds)


def _extra(unset: str, area: str, has_effect: bool) -> dict[str, Any]:
    return {"x-unset": unset, "x-area": area, "x-has-effect": has_effect}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    names: ClassVar[Mapping[str, FieldInfo]] = {}
    """The fields by their names in JSON."""
    whole: ClassVar[frozenset[str]] = frozenset()
    """Fields that are whole numbers: 1.0 is one, as in JSON schema."""
    required: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        del kwargs
        cls.names = {field.alias or name: field for name, field in cls.model_fields.items()}
        cls.whole = frozenset(name for name, field in cls.names.items() if _is_whole(field.annotation))
        cls.required = tuple(name for name, field in cls.names.items() if field.is_required())


def _is_whole(annotation: object) -> bool:
    """Whether it is an int, alone or in a union."""
    return annotation is int or (
        get_origin(annotation) in (Annotated, Union, UnionType) and any(map(_is_whole, get_args(annotation)))
    )


class RequestModel(_Model):
    """Base of the models of bodies and queries."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Names that clients know and this server does not serve, each with the way out."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other servers' names for fields of this model."""


class Part(_Model):
    """Base of the models of objects within a request."""

    without_effect: ClassVar[tuple[str, ...]] = ()
    """Keys that are accepted and dropped."""

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, value: object, info: ValidationInfo) -> object:
        """The keys that are given. An unknown key is refused before a missing one, and both before any value."""
        if not isinstance(value, dict):
            return value
        given = cls.given(value, info)
        for key in cls.required:
            if key not in given:
                raise validation.missing_key(key)
        return given

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        """`value` without nulls and keys without effect. Refuses an unknown key, or notes it if that is allowed."""
        given: dict[str, object] = {}
        unknown = []
        for key, item in value.items():
            if key not in cls.names:
                if key not in cls.without_effect:
                    unknown.append(key)
            elif item is not None:
                given[key] = int(item) if type(item) is float and key in cls.whole and item.is_integer() else item
        if unknown:
            if info.context is None:
                raise validation.unknown_key(unknown[0])
            info.context[id(value)] = unknown
        return given


R = TypeVar("R", bound=RequestModel)


def read(model: type[R], body: Mapping[str, object], ignored: list[str] | None = None) -> R:
    """Make a model of a JSON object. Raises `RequestError` for the first field that is wrong.

    Unknown names come first, then the fields in the order of the model. With `ignored`, the paths of unknown names at
    any depth are added to it; without it they are refused.
    """
    spelt: dict[str, str] = {}
    values = _values(model, body, spelt, ignored)
    unknown: dict[int, list[str]] | None = None if ignored is None else {}
    try:
        with ignoring_unknown(ignored):
            made = model.model_validate(values, context=unknown)
    except ValidationError as error:
        raise validation.request_error(error, spelt) from None
    if ignored is not None and unknown:
        ignored += _paths(body, "", unknown)
    return made


def _values(
    model: type[RequestModel], body: Mapping[str, object], spelt: dict[str, str], ignored: list[str] | None
) -> dict[str, object]:
    """Field name -> what is given for it. Fills `spelt`: the names that stand for fields in `body`."""
    values: dict[str, object] = {}
    names, whole = model.names, model.whole
    for name, value in body.items():
        if name in model.aliases:
            field = model.aliases[name]
            if value is None:
                continue
            other = spelt.get(field, field)
            if body.get(other) is not None:
                raise RequestError("invalid_value", f"Only one of '{other}' and '{name}' can be given.", name)
            spelt[field], values[field] = name, value
        elif name not in names:
            _check_unknown(model, name, value, ignored)
        elif value is not None:
            values[name] = int(value) if type(value) is float and name in whole and value.is_integer() else value
    return values


def _check_unknown(model: type[RequestModel], name: str, value: object, ignored: list[str] | None) -> None:
    if name in model.refused:
        if value is not None:
            raise errors.unsupported_parameter(name, model.refused[name])
    elif ignored is None:
        near = difflib.get_close_matches(name[:64], list(model.names), n=1, cutoff=0.75)
        raise errors.unknown_parameter(name, near[0] if near else None)
    else:
        ignored.append(name)


def _paths(value: object, path: str, unknown: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """The paths of all unknown keys within `value`; `unknown` has them by the id of their object."""
    if isinstance(value, dict):
        for key in unknown.get(id(value), ()):
            yield f"{path}.{key}"
        for key, item in value.items():
            yield from _paths(item, f"{path}.{key}" if path else key, unknown)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _paths(item, f"{path}[{i}]", unknown)


# --- Types of values -------------------------------------------------------------------------------------------------


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
    """The client sends a `wire`, and the model holds what `convert` makes of it and of the field's name.

    `convert` may raise `RequestError`.
    """

    wire: Any
    convert: Callable[[Any, str], object]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(
            _refusing(self.convert), handler.generate_schema(self.wire)
        )


@dataclass(eq=False, frozen=True, slots=True)
class ReadBy:
    """A value that `read` checks and converts, given the field's name: long lists, in slices.

    pydantic holds the interpreter lock while it checks a list, but not while it calls Python. `wire` is what the
    documentation says of the value. `read` may raise `RequestError`.
    """

    read: Callable[[Any, str], object]
    wire: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            _refusing(self.read), json_schema_input_schema=handler.generate_schema(self.wire)
        )


def _refusing(read: Callable[[Any, str], object]) -> Callable[[Any, ValidationInfo], object]:
    """`read` as a validator: what it refuses is told by pydantic in the order of the fields."""

    def validate(value: Any, info: ValidationInfo) -> object:
        try:
            return read(value, info.field_name or "")
        except RequestError as error:
            raise validation.refused(error) from None

    return validate


def form(expected: str, tag_of: Callable[[Any], str | None], types: tuple[str, ...] = ()) -> Discriminator:
    """Chooses the member of a union by `tag_of` the value; None: no member takes it.

    `expected`: as in "expected a string, but got an integer instead". `types`: what the key `type` of an object may be,
    if the union has objects. A tag is written `<so>`: it is no part of a path.
    """
    return Discriminator(
        tag_of,
        custom_error_type="wrong_form",
        custom_error_message="The value has a wrong form.",
        custom_error_context={"expected": expected, "types": " ".join(types)},
    )


@dataclass(eq=False, frozen=True, slots=True)
class Old:
    """A value that a `Kind` reads."""

    kind: Kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(_refusing(self.kind.read))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del schema, handler
        return self.kind.schema()
