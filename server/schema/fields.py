"""How a request type declares its fields, and how a JSON object becomes one.

A request type is a frozen dataclass whose fields are made by `wire`: name, type, bounds, default and what it does stand
together, once. `read` is the only reader; /openapi.json, the documentation and the boundary tests walk the same
declarations. Knows no particular field.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from inferd.engine.api.errors import RequestError
from inferd.server.errors import table as errors
from inferd.server.schema.kinds import Kind, ignoring_unknown

_KEY = "inferd.wire"


@dataclass(frozen=True, slots=True)
class Wire:
    """One field as it travels."""

    kind: Kind
    about: str = ""
    """What it does and what it costs, as the documentation says it."""
    unset: str = ""
    """What holds where it is not given."""
    area: str = ""
    """The part of the documentation it belongs to."""
    required: bool = False
    has_effect: bool = True
    """False: accepted because clients send it, and without consequence."""


def wire(
    kind: Kind,
    about: str = "",
    *,
    unset: str = "",
    area: str = "",
    default: object = None,
    required: bool = False,
    has_effect: bool = True,
) -> Any:
    """Declare a field. JSON null stands for "not given", as it does at OpenAI."""
    return field(default=default, metadata={_KEY: Wire(kind, about, unset, area, required, has_effect)})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """Base of the request types."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Names that clients know and this server does not serve, each with the way out."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other servers' names for fields of this type."""


R = TypeVar("R", bound=RequestFields)


def wire_fields(request_type: type[RequestFields]) -> dict[str, Wire]:
    """Field name -> declaration, in the order of declaration."""
    return {item.name: item.metadata[_KEY] for item in dataclasses.fields(request_type)}


def read(request_type: type[R], body: Mapping[str, object], ignored: list[str] | None = None) -> R:
    """Make a request of a JSON object. Raises `RequestError` for the first field that is wrong.

    With `ignored`, names that nobody knows, at any depth, are collected there; without it they are refused.
    """
    declared = wire_fields(request_type)
    spelt = {name: name for name in declared}
    for name, value in body.items():
        if name in request_type.aliases:
            _resolve(request_type, name, body, spelt)
        elif name not in declared:
            _unknown(request_type, name, value, ignored)
    values: dict[str, object] = {}
    with ignoring_unknown(ignored):
        for name, declaration in declared.items():
            value = body.get(spelt[name])
            if value is not None:
                values[name] = declaration.kind.read(value, spelt[name])
            elif declaration.required:
                raise errors.missing(name)
    return request_type(**values)


def _resolve(request_type: type[RequestFields], alias: str, body: Mapping[str, object], spelt: dict[str, str]) -> None:
    """Let a field be read from its alias. Raises `RequestError` where both names have a value."""
    name = request_type.aliases[alias]
    if body[alias] is None:
        return
    if body.get(spelt[name]) is not None:
        raise RequestError("invalid_value", f"Only one of '{spelt[name]}' and '{alias}' can be given.", alias)
    spelt[name] = alias


def _unknown(request_type: type[RequestFields], name: str, value: object, ignored: list[str] | None) -> None:
    if name in request_type.refused:
        if value is not None:
            raise errors.unsupported_parameter(name, request_type.refused[name])
    elif ignored is None:
        raise _unknown_parameter(request_type, name)
    else:
        ignored.append(name)


def _unknown_parameter(request_type: type[RequestFields], name: str) -> RequestError:
    near = difflib.get_close_matches(name[:64], list(wire_fields(request_type)), n=1, cutoff=0.75)
    return errors.unknown_parameter(name, near[0] if near else None)
