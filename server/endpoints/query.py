"""Reads the query of a URL into its model. The types are the same as in JSON, but written as text."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from fastapi import Depends
from starlette.requests import Request

from inferd.server.errors import messages as errors
from inferd.server.schema.json_schema import schema_of, types_of
from inferd.server.schema.model import RequestModel, option, read
from inferd.server.schema.values import Text

R = TypeVar("R", bound=RequestModel)


class ModelQuery(RequestModel):
    """Query of a route that is about one model. `Services.of_query` reads it."""

    model: Text | None = option("A name of the model, or of an adapter of it.", unset="the first model")


MAX_PARAMETERS = 64
"""Maximum number of parameters of a URL, counted before any is read."""

_WORDS: dict[str, object] = {"true": True, "false": False}


@functools.cache
def _types(model: type[RequestModel]) -> dict[str, tuple[str, ...]]:
    """The JSON types of each parameter."""
    return {name: tuple(types_of(schema)) for name, schema in schema_of(model)["properties"].items()}


def query_of(model: type[R]) -> Any:
    """A FastAPI dependency that reads the query by `read_query`."""

    async def parsed(request: Request) -> R:
        return read_query(request, model)

    return Depends(parsed)


def read_query(request: Request, model: type[R]) -> R:
    """Read the query. A list repeats its name, with or without `[]` after it. Raises `RequestError`."""
    num_given = request.scope["query_string"].count(b"&") + 1
    if num_given > MAX_PARAMETERS:
        raise errors.too_many_properties("query", MAX_PARAMETERS, num_given)
    types = _types(model)
    values: dict[str, object] = {}
    lists: dict[str, list[str]] = {}
    for given, text in request.query_params.multi_items():
        name = given.removesuffix("[]")
        if "array" in types.get(name, ()):
            values[name] = lists.setdefault(name, [])
            lists[name].append(text)
        elif "integer" in types.get(name, ()) and text.isascii() and text.isdigit() and len(text) <= 10:
            values[name] = int(text)
        elif "boolean" in types.get(name, ()):
            values[name] = _WORDS.get(text.lower(), text)
        else:
            values[name] = text
    return read(model, values)
