"""Reads an HTTP body or the query of a URL into a request type, which `schema` checks.

A body has its content type checked and its strict JSON parsed first. Long bodies are read on a thread, in a way that
lets other threads run: see `strict_json`. A query has the same types as JSON, but written as text.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from fastapi import Depends
from starlette.requests import ClientDisconnect, Request

from inferd.engine.api.errors import RequestError
from inferd.server.endpoints.service import Service
from inferd.server.errors import messages as errors
from inferd.server.schema import strict_json
from inferd.server.schema.json_schema import schema_of, types_of
from inferd.server.schema.notices import Notice
from inferd.server.schema.request_model import RequestModel, option, read
from inferd.server.schema.values import Flag, Text
from inferd.server.transport.sse import ClientGoneError, unless_disconnected

R = TypeVar("R", bound=RequestModel)

_INLINE_BYTES = 32 * 1024


async def read_body(request: Request, service: Service, request_type: type[R]) -> R:
    """Read and parse the body. Its model's name and its notices go into the request's state. Raises `RequestError`, and
    `ClientGoneError` if the body never arrives."""
    _check_content_type(request.headers.get("content-type"))
    try:
        raw = await request.body()
    except ClientDisconnect as error:
        raise ClientGoneError from error

    notices: list[Notice] = request.state.notices

    def work() -> R:
        ignored: list[str] | None = [] if service.unknown_fields == "warn" else None
        fields = parse_object(raw)
        request.state.model = fields.get("model")
        body = read(request_type, fields, ignored, notices)
        if ignored:
            notices.append(Notice("unknown_parameter", _ignored_words(ignored)))
        return body

    if len(raw) <= _INLINE_BYTES:
        return work()
    return await unless_disconnected(request.receive, service.threads.run(work, len(raw)))


def body_of(model: type[R]) -> Any:
    """A FastAPI dependency that reads the body by `read_body`.

    FastAPI itself would read the body before any other dependency, with a parser that is not strict.
    """

    async def parsed(request: Request) -> R:
        service: Service = request.app.state.services.first
        return await read_body(request, service, model)

    return Depends(parsed)


def parse_object(raw: bytes) -> dict[str, object]:
    """Parse strict JSON. Raises `RequestError`."""
    try:
        value = strict_json.parse(raw)
    except ValueError as error:
        raise _malformed(str(error)) from error
    if not isinstance(value, dict):
        raise _malformed(f"expected an object, but got {errors.json_type(value)}")
    return value


def _check_content_type(content_type: str | None) -> None:
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        found = f"Unsupported content type: '{errors.shown(media_type)}'." if media_type else "Missing content type."
        message = (
            f"{found} This API method only accepts 'application/json' "
            "requests. Please send the header 'Content-Type: application/json'."
        )
        raise RequestError("unsupported_content_type", message)


def _malformed(reason: str) -> RequestError:
    message = f"We could not parse the JSON body of your request. It must be one valid JSON object: {reason}."
    return RequestError("malformed_json", message)


def _ignored_words(ignored: list[str]) -> str:
    names = (errors.clip(name, 64) for name in ignored[:10])
    return "Unknown parameters were ignored: " + ", ".join(f"'{name}'" for name in names)


class ModelQuery(RequestModel):
    """Query of a route that is about one model. `Services.of_query` reads it."""

    model: Text | None = option("A name of the model, or of an adapter of it.", unset="the first model")


class ResetQuery(RequestModel):
    """Query of the route that clears the prefix cache, under vLLM's names."""

    reset_running_requests: Flag | None = option(
        "Clear prefixes that running requests use too. The requests go on.", unset="false"
    )
    reset_external: Flag | None = option(
        "Remove what the directory of `--kv-dir` has of this server's models too.", unset="false"
    )


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
