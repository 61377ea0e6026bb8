"""Base classes and value types of the pydantic models that requests are read into.

`read` makes a model of a parsed JSON object and is the only reader. JSON null means "not given" everywhere. Each file
of this package that reads a union of types has a table of them. A `Row` says what the server does with a tool, a block,
an item or a key. The reader, the documentation and the tests share it. Knows no particular field.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from inferd.engine.api.errors import RequestError
from inferd.server.errors import messages as errors
from inferd.server.errors import validation
from inferd.server.schema.notices import Name, Notice
from inferd.server.schema.strict_json import Counts

Kind = Literal["enforced", "hint", "offer", "demand"]

ABOUT: Mapping[Kind, str] = {
    "enforced": "The server does it.",
    "hint": "It can change speed, cost or bookkeeping, not the answer. It is accepted in silence.",
    "offer": "It lets the model do something that this server does not have. It is accepted, the model does not see "
    "it, and a notice says so.",
    "demand": "The caller relies on it, and the server cannot do it. The request is refused by name, with the way out.",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One type of a union, or one key of an object."""

    kind: Kind
    about: str
    """A sentence that says what the server does with it; for a demand it is the way out."""


def key_of(rows: Mapping[str, Row], name: str) -> str | None:
    """The key of a name's row: the name itself, or the key that ends in `*` and begins it, for types with a version."""
    if name in rows:
        return name
    return next((key for key in rows if key.endswith("*") and name.startswith(key[:-1])), None)


def option(
    about: str, *, unset: str = "", area: str = "", has_effect: bool = True, kind: Kind | None = None, **bounds: Any
) -> Any:
    """A field that may be left out.

    `about`: what it does and what it costs, for the documentation. `unset`: what holds if it is not given. `area`: its
    part of the documentation. `has_effect` false: accepted because clients send it, without any effect. `kind`: of a
    field without effect that is no hint: a demand is refused unless its value says nothing. `bounds`: as of pydantic's
    `Field`.
    """
    extra = _extra(unset, area, kind or ("enforced" if has_effect else "hint"))
    return Field(default=None, description=about, json_schema_extra=extra, **bounds)


def required(about: str, *, area: str = "", **bounds: Any) -> Any:
    """A field that must be given; see `option`."""
    return Field(description=about, json_schema_extra=_extra("", area, "enforced"), **bounds)


def _extra(unset: str, area: str, kind: Kind) -> dict[str, Any]:
    return {"x-unset": unset, "x-area": area, "x-has-effect": kind == "enforced", "x-kind": kind}


@dataclass(frozen=True, slots=True)
class RequestContext:
    """State that the validators of one request share."""

    unknown: dict[int, list[str]] | None = None
    """The unknown keys of each object, by the object's id; None: they are refused."""
    counts: Counts = field(default_factory=Counts)
    """Counts all JSON in the request's strings: many strings together may hold no more than one body."""
    notices: list[Notice] = field(default_factory=list)
    """Notices for the answer."""


def tell(info: ValidationInfo, name: Name, text: str) -> None:
    """Add a notice to the answer of the request that is read."""
    context: RequestContext | None = info.context
    if context is not None:
        context.notices.append(Notice(name, text))


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    names: ClassVar[Mapping[str, FieldInfo]] = {}
    """The fields by their names in JSON."""
    whole: ClassVar[frozenset[str]] = frozenset()
    """Fields that are whole numbers: 1.0 is one, as in JSON schema."""
    required: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[Mapping[str, type[Part]]] = {}
    """Fields that are objects of their own."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Names that clients know and this server does not serve, each with the way out."""
    offered: ClassVar[Mapping[str, str]] = {}
    """Names that offer the model what this server does not have, each with what is done instead. They are accepted and
    told."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        del kwargs
        cls.names = {field.alias or name: field for name, field in cls.model_fields.items()}
        cls.whole = frozenset(name for name, field in cls.names.items() if _is_whole(field.annotation))
        cls.parts = {name: part for name, field in cls.names.items() if (part := _part(field.annotation)) is not None}
        cls.required = tuple(name for name, field in cls.names.items() if field.is_required())

    kinds: ClassVar[Mapping[str, Kind]] = {}
    """Kinds of fields that are checked and not enforced."""

    @classmethod
    def near(cls, name: str) -> str | None:
        """The field that a misspelled name means."""
        return next(iter(difflib.get_close_matches(name[:64], list(cls.names), n=1, cutoff=0.75)), None)

    @classmethod
    def kind_of(cls, name: str) -> Kind | None:
        """The kind of a key; None if the server does not know it."""
        if name in cls.refused:
            return "demand"
        if name in cls.offered:
            return "offer"
        if name in cls.kinds:
            return cls.kinds[name]
        field = cls.names.get(name)
        if field is None:
            return None
        extra = field.json_schema_extra
        kind: Any = extra.get("x-kind") if isinstance(extra, dict) else None
        return kind or "enforced"


def _is_whole(annotation: object) -> bool:
    """Whether it is an int, alone or in a union."""
    return annotation is int or (
        get_origin(annotation) in (Annotated, Union, UnionType) and any(map(_is_whole, get_args(annotation)))
    )


def _part(annotation: object) -> type[Part] | None:
    options = (annotation, *get_args(annotation))
    return next((option for option in options if isinstance(option, type) and issubclass(option, Part)), None)


class RequestModel(_Model):
    """Base of the models of bodies and queries."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """Other servers' names for fields of this model."""
    keeps_spelling: ClassVar[bool] = False
    """Whether a request knows by which names the client gave its fields, for what is refused later."""
    _spelt: Mapping[str, str] = PrivateAttr(default_factory=dict)
    """Field -> the other name by which the client gave it."""

    def spelt(self, name: str) -> str:
        """The field's name as the client wrote it."""
        return self._spelt.get(name, name)

    def has_own_word(self, error: RequestError) -> bool:
        """Whether the client gave the refused field by another name."""
        return self.spelt(error.param or "") != (error.param or "")

    def in_its_words(self, error: RequestError) -> RequestError:
        """The same refusal, with the name of its field as the client wrote it."""
        name = self.spelt(error.param or "")
        return error.reworded(error.message.replace(f"'{error.param}'", f"'{name}'"), name)

    @classmethod
    def kind_of(cls, name: str) -> Kind | None:
        return super().kind_of(cls.aliases.get(name, name))


class Part(_Model):
    """Base of the models of objects within a request."""

    without_effect: ClassVar[tuple[str, ...]] = ()
    """Keys that are accepted and dropped: they cannot change the answer."""

    @classmethod
    def kind_of(cls, name: str) -> Kind | None:
        return "hint" if name in cls.without_effect else super().kind_of(name)

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
    def is_asked(cls, offered: object) -> bool:
        """Whether the value of an offered key asks for anything."""
        return bool(offered)

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        """`value` without nulls and keys without effect. Refuses an unknown key, or notes it if that is allowed."""
        given: dict[str, object] = {}
        unknown = []
        for key, item in value.items():
            if key not in cls.names:
                if key in cls.refused:
                    if item is not None:
                        raise validation.refused_key(key, cls.refused[key])
                elif key in cls.offered:
                    if cls.is_asked(item):
                        tell(info, "hosted_tool", f"'{key}' is not used: {cls.offered[key]}")
                elif key not in cls.without_effect:
                    unknown.append(key)
            elif item is not None:
                given[key] = int(item) if type(item) is float and key in cls.whole and item.is_integer() else item
        if unknown:
            context: RequestContext | None = info.context
            if context is None or context.unknown is None:
                raise validation.unknown_key(unknown[0], cls.near(unknown[0]))
            context.unknown[id(value)] = unknown
        return given


R = TypeVar("R", bound=RequestModel)


def read(
    model: type[R], body: Mapping[str, object], ignored: list[str] | None = None, notices: list[Notice] | None = None
) -> R:
    """Make a model of a JSON object. Raises `RequestError` for the first field that is wrong.

    Unknown names come first, then the fields in the order of the model. With `ignored`, the paths of unknown names at
    any depth are added to it; without it they are refused. `notices` is filled.
    """
    spelt: dict[str, str] = {}
    context = RequestContext(None if ignored is None else {}, notices=[] if notices is None else notices)
    values = _values(model, body, spelt, ignored, context.notices)
    try:
        made = model.model_validate(values, context=context)
    except ValidationError as error:
        raise validation.request_error(error, spelt) from None
    if spelt and model.keeps_spelling:
        made._spelt = spelt
    if ignored is not None and context.unknown:
        ignored += _paths(body, "", context.unknown)
    return made


def _values(
    model: type[RequestModel],
    body: Mapping[str, object],
    spelt: dict[str, str],
    ignored: list[str] | None,
    notices: list[Notice],
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
        elif name in model.offered:
            if value not in (None, False, "", []):
                notices.append(Notice("hosted_tool", f"'{name}' is not used: {model.offered[name]}"))
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
        raise errors.unknown_parameter(name, model.near(name))
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
