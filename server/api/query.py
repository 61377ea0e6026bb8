"""The query of a URL as a request type: the same kinds, given as text."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from inferd.server.errors import table as errors
from inferd.server.schema.fields import RequestFields, read, wire_fields
from inferd.server.schema.kinds import Array, Integer, Only

R = TypeVar("R", bound=RequestFields)

MAX_PARAMETERS = 64
"""Parameters of one URL, counted before any of them is read."""

_WORDS: dict[str, object] = {"true": True, "false": False}


def read_query(request: Request, query_type: type[R]) -> R:
    """Raises `RequestError`. A list is given by naming it again, with or without `[]` behind its name."""
    num_given = request.scope["query_string"].count(b"&") + 1
    if num_given > MAX_PARAMETERS:
        raise errors.too_many_properties("query", MAX_PARAMETERS, num_given)
    kinds = {name: declared.kind for name, declared in wire_fields(query_type).items()}
    values: dict[str, object] = {}
    lists: dict[str, list[str]] = {}
    for given, text in request.query_params.multi_items():
        name = given.removesuffix("[]")
        match kinds.get(name):
            case Array():
                values[name] = lists.setdefault(name, [])
                lists[name].append(text)
            case Integer() if text.isascii() and text.isdigit() and len(text) <= 10:
                values[name] = int(text)
            case Only():
                values[name] = _WORDS.get(text.lower(), text)
            case _:
                values[name] = text
    return read(query_type, values)
