"""The query of a URL as a request type: the same kinds, given as text."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from inferd.server.schema.fields import RequestFields, read, wire_fields
from inferd.server.schema.kinds import Array, Integer, Only

R = TypeVar("R", bound=RequestFields)

_WORDS: dict[str, object] = {"true": True, "false": False}


def read_query(request: Request, query_type: type[R]) -> R:
    """Raises `RequestError`. A list is given by naming it again, with or without `[]` behind its name."""
    given = [(name.removesuffix("[]"), text) for name, text in request.query_params.multi_items()]
    kinds = {name: declared.kind for name, declared in wire_fields(query_type).items()}
    values: dict[str, object] = {}
    for name, text in given:
        match kinds.get(name):
            case Array():
                values[name] = [other for key, other in given if key == name]
            case Integer() if text.isascii() and text.isdigit() and len(text) <= 10:
                values[name] = int(text)
            case Only():
                values[name] = _WORDS.get(text.lower(), text)
            case _:
                values[name] = text
    return read(query_type, values)
