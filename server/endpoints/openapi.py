"""/openapi.json: FastAPI's document of the routes, with this server's errors, headers and aliases of fields.

It is made when it is first asked for, with keys or without.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import orjson
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from inferd.server.endpoints.route import Access, Route
from inferd.server.endpoints.routes import (
    CLASSIFIES,
    DOCS,
    DOCS_FILES,
    EMBEDDINGS,
    HEALTH,
    LOAD_LORA,
    METRICS,
    PREDICT,
    READY,
    RERANKS,
    ROUTES,
    SCORES,
    SLEEP,
    UNLOAD_LORA,
    WAKE_UP,
)
from inferd.server.endpoints.service import Service
from inferd.server.errors import anthropic as anthropic_errors
from inferd.server.errors import table
from inferd.server.schema.json_schema import Schema, schema_of, schemas_of_answers
from inferd.server.schema.latency import (
    MAX_TARGET_MS,
    MAX_TIMEOUT_S,
    MIN_TARGET_MS,
    MIN_TIMEOUT_S,
    TIMEOUT_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
)
from inferd.server.schema.request_model import RequestModel
from inferd.server.schema.strict_json import exact
from inferd.server.transport.middleware import WARNING_HEADER

_ANY_REQUEST = (400, 405, 408, 413, 415, 431, 500)
"""Statuses that every route may answer, because the head, the method or the body of a request may be wrong."""
_ANSWERED_WITH_BODY = (404, 429, 503)
_JSON, _STREAM = "application/json", "text/event-stream"
_MEDIA = {
    **dict.fromkeys((METRICS, LOAD_LORA, UNLOAD_LORA), "text/plain"),
    DOCS: "text/html",
    **dict.fromkeys(DOCS_FILES, "*/*"),
}
_MORE = {
    **dict.fromkeys((HEALTH, READY, WAKE_UP), (503,)),
    SLEEP: (409, 503),
    **dict.fromkeys((EMBEDDINGS, *RERANKS, *SCORES, *CLASSIFIES, PREDICT, *DOCS_FILES), (501,)),
}
"""Further statuses of some routes."""

_SCHEMAS = "#/components/schemas/"
_EVENT = "Data of one event. A stream of chunks that did not fail ends with the data `[DONE]`."

_SECONDS, _MILLISECONDS, _TEXT = (
    {"type": "integer", "minimum": 1},
    {"type": "integer", "minimum": 1},
    {"type": "string"},
)
_RETRY: dict[str, Schema] = {"Retry-After": _SECONDS, "Retry-After-Ms": _MILLISECONDS}
_NO_RETRY: dict[str, Schema] = {"X-Should-Retry": _TEXT}
_HEADERS: dict[int, dict[str, Schema]] = {
    200: {"x-request-id": _TEXT, WARNING_HEADER: _TEXT},
    401: {"WWW-Authenticate": _TEXT},
    405: {"Allow": _TEXT},
    429: _RETRY,
    501: _NO_RETRY,
    503: _RETRY | _NO_RETRY,
    anthropic_errors.OVERLOADED: _RETRY | _NO_RETRY,
}


class OpenApi:
    """The route's handler."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._bodies: dict[bool, bytes] = {}
        self._making = asyncio.Lock()
        """Held while a document is made, so that callers at the same time share it. The first takes 0.9 s (Zen 4)."""

    async def get(self, request: Request) -> Response:
        needs_key = request.state.needs_key
        async with self._making:
            if needs_key not in self._bodies:
                make = partial(document, request.app.routes, self._service.version, needs_key=needs_key)
                made = await self._service.threads.run(make, 0, is_begun=True)
                self._bodies[needs_key] = exact(orjson.dumps(made))
        return Response(self._bodies[needs_key], media_type=_JSON)


def document(routes: Sequence[BaseRoute], version: str, *, needs_key: bool = True) -> dict[str, Any]:
    """FastAPI's document of `routes`, with this server's errors, schemas and keys.

    `version` is inferd's. `needs_key`: whether keys are set, so that callers need one.
    """
    made = get_openapi(
        title="inferd",
        version=version,
        summary="An OpenAI-compatible LLM serving daemon.",
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        routes=routes,
    )
    answers, objects = _answer_schemas()
    for (route, media), schema in answers.items():
        done = made["paths"][_path(route)][route.method.lower()]["responses"]["200"]
        done.setdefault("content", {})[media] = {"schema": schema}
    for route in ROUTES:
        operation = made["paths"][_path(route)][route.method.lower()]
        operation["security"] = _security(route, needs_key=needs_key)
        operation.pop("description", None)  # FastAPI takes it from the handler's docstring
        responses = operation["responses"]
        responses |= {status: {"$ref": one["$ref"]} for status, one in responses.items() if "$ref" in one}
    models = {route.fields for route in ROUTES if route.fields is not None}
    schemas = {model.__name__: body_schema(model) for model in sorted(models, key=lambda model: model.__name__)}
    made["components"] = {
        "schemas": schemas | objects,
        "responses": _refusals(),
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
    }
    return made


def operation_of(route: Route) -> dict[str, Any]:
    """Arguments for FastAPI that describe a route in its document."""
    parameters = [*_path_parameters(route), *_query_parameters(route), *_header_parameters(route)]
    extra: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if route.fields is not None:
        extra["requestBody"] = {"required": True, "content": _json_content(route.fields.__name__)}
    return {
        "operation_id": _operation_id(route),
        "tags": [route.area],
        "summary": route.about,
        "status_code": 501 if route.missing else None,
        "responses": _responses(route),
        "openapi_extra": extra,
    }


def body_schema(model: type[RequestModel]) -> Schema:
    """Schema of a request body for clients, with readable defaults."""
    schema = schema_of(model)
    return {**schema, "properties": {name: _property(value) for name, value in schema["properties"].items()}}


def default_of(unset: str) -> object:
    """Default of a field, if it is the same for every model and request; otherwise None."""
    try:
        value = json.loads(unset)
    except ValueError:
        return None
    return value if isinstance(value, (bool, int, float)) else None


def _property(field: Schema) -> Schema:
    """Schema of a field without the keys that only the documentation reads."""
    schema = {key: value for key, value in field.items() if not key.startswith("x-")}
    default = default_of(field["x-unset"])
    return {**schema, "description": _described(field)} | ({} if default is None else {"default": default})


def _described(field: Schema) -> str:
    text, unset = field["description"], field["x-unset"]
    if not field["x-has-effect"]:
        text = f"Accepted, and without effect. {text}".strip()
    return f"{text} If it is not given: {unset}." if unset and default_of(unset) is None else text


def _security(route: Route, *, needs_key: bool) -> list[dict[str, list[str]]]:
    """Kinds of keys for a route, each of which is enough. An admin route needs a key even if no other route does."""
    if route.access is Access.PUBLIC or (route.access is Access.KEY and not needs_key):
        return []
    own: list[dict[str, list[str]]] = [{"x-api-key": []}]
    return [{"key": []}, *(own if anthropic_errors.is_anthropic(route.path) else ())]


def _responses(route: Route) -> dict[int | str, Any]:
    names_one = "{" in route.path or (route.query is not None and "model" in route.query.names)
    statuses = {*_ANY_REQUEST, *((404,) if names_one else ()), *_MORE.get(route, ())}
    statuses |= {Access.PUBLIC: set(), Access.KEY: {401}, Access.ADMIN: {401, 403}}[route.access]
    if route.fields is not None:
        statuses |= set(_ANSWERED_WITH_BODY)
    if route.missing:
        return _refused(statuses | {501}, "Error")
    done: dict[int | str, Any] = {200: {"description": "Done.", "headers": _headers(200)}}
    if anthropic_errors.is_anthropic(route.path):
        statuses = {anthropic_errors.OVERLOADED if status == 503 else status for status in statuses}
        return done | _refused(statuses, "AnthropicError")
    return done | _refused(statuses, "Error")


@cache
def _answer_schemas() -> tuple[dict[tuple[Route, str], Schema], dict[str, Schema]]:
    """((route, media type) -> schema of its answer, name of an object in answers -> its schema). Takes 0.4 s."""
    places: list[tuple[Route, str, Any]] = []
    for route in ROUTES:
        bodies = {_MEDIA.get(route, _JSON): route.answer, _STREAM: route.events}
        places += [(route, media, kind) for media, kind in bodies.items() if kind is not None]
    kinds = [kind for *_, kind in places]
    schemas, objects = schemas_of_answers([*kinds, table.Error, anthropic_errors.AnthropicError], _SCHEMAS + "{model}")
    answers = {(route, media): schema for (route, media, _), schema in zip(places, schemas, strict=False)}
    streams = {place: {"description": _EVENT, **schema} for place, schema in answers.items() if place[1] == _STREAM}
    return answers | streams, objects


def _refused(statuses: Iterable[int], envelope: str) -> dict[int | str, Any]:
    return {status: {"$ref": f"#/components/responses/{envelope}{status}"} for status in sorted(statuses)}


def _refusals() -> dict[str, Any]:
    """One response for each status and error shape, with its possible codes."""
    found: dict[str, Any] = {}
    for row in table.ROWS.values():
        status = row.status
        overloaded = anthropic_errors.OVERLOADED if status == 503 else status
        for envelope, seen in (("Error", status), ("AnthropicError", overloaded)):
            response = found.setdefault(f"{envelope}{seen}", {"description": "", "content": _json_content(envelope)})
            response["description"] = f"{response['description']} {row.about}".strip()
            if seen in _HEADERS:
                response["headers"] = _headers(seen)
    return found


def _headers(status: int) -> dict[str, Any]:
    return {name: {"schema": schema} for name, schema in _HEADERS[status].items()}


def _path(route: Route) -> str:
    return route.path.replace(":path}", "}")


def _operation_id(route: Route) -> str:
    words = [route.method.lower(), *_path(route).replace("{", "").replace("}", "").strip("/").split("/")]
    return "_".join(words).replace(".", "_")


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    if "{" not in route.path:
        return []
    name = _path(route).partition("{")[2].partition("}")[0]
    return [{"name": name, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    """Parameters of the query. A list repeats its parameter."""
    fields = {} if route.query is None else body_schema(route.query)["properties"]
    return [
        {"name": name, "in": "query", "description": schema.pop("description"), "schema": schema}
        for name, schema in fields.items()
    ]


def _header_parameters(route: Route) -> list[dict[str, Any]]:
    """Headers of routes that read prompts."""
    text = "Seconds from the request's arrival to the end of its answer"
    if route.fields is not None and "timeout" in route.fields.names:
        text += "; if `timeout` is given too, the shorter one counts"
    elif not anthropic_errors.is_anthropic(route.path):
        return []
    ttft = "Target for the time from the request's arrival to its first token, in milliseconds."
    tpot = "Target for the mean time of each token after the first, in milliseconds."
    seconds = {"type": "number", "minimum": MIN_TIMEOUT_S, "maximum": MAX_TIMEOUT_S}
    target = {"type": "number", "minimum": MIN_TARGET_MS, "maximum": MAX_TARGET_MS}
    parameters = ((TIMEOUT_HEADER, f"{text}.", seconds), (TTFT_HEADER, ttft, target), (TPOT_HEADER, tpot, target))
    return [
        {"name": name, "in": "header", "description": about, "schema": schema} for name, about, schema in parameters
    ]


def _json_content(name: str) -> dict[str, Any]:
    return {_JSON: {"schema": {"$ref": _SCHEMAS + name}}}
