"""Puts the HTTP side together: one table of routes, the middleware in order, and the errors every route may raise.

`create_app` takes what it stands on as arguments; nothing here is global. Knows no engine and starts nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from typing import Literal, Self

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server import errors, middleware
from inferd.server.api.chat import ChatApi
from inferd.server.api.completions import CompletionsApi
from inferd.server.api.health import HealthApi
from inferd.server.api.models import ModelsApi
from inferd.server.api.service import Metrics, Service
from inferd.server.api.state import StateApi
from inferd.server.api.tokens import TokensApi
from inferd.server.generate.intake import Intake
from inferd.server.generate.ports import Router
from inferd.server.generate.prompts import Prompts
from inferd.server.settings import Settings
from inferd.server.sse import KEEP_ALIVE_S, ClientGoneError
from inferd.server.text.lanes import Lanes
from inferd.server.text.model import ServedModel


class Access(Enum):
    """Who may call a route."""

    PUBLIC = "public"
    """Anyone: probes and scrapers have no key."""
    KEY = "key"
    """Callers with a key, where keys are set."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table."""

    method: Literal["GET", "POST"]
    path: str
    access: Access
    handler: Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """What the operator decides about the HTTP side."""

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    keep_alive_s: float = KEEP_ALIVE_S
    unknown_fields: Literal["refuse", "warn"] = "refuse"
    has_access_log: bool = True

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        return cls(
            api_keys=tuple(key.get_secret_value() for key in settings.api_key),
            max_body_bytes=settings.max_body_bytes,
            unknown_fields=settings.unknown_fields,
            has_access_log=settings.access_log,
        )


def create_app(model: ServedModel, router: Router, metrics: Metrics, options: AppOptions) -> FastAPI:
    """The ASGI application for one model. Its threads end with its lifespan."""
    lanes = Lanes()
    prompts = Prompts(model, lanes)
    service = Service(
        model=model,
        router=router,
        metrics=metrics,
        intake=Intake(model, prompts),
        prompts=prompts,
        lanes=lanes,
        version=version("inferd"),
        unknown_fields=options.unknown_fields,
        body_timeout_s=options.body_timeout_s,
        keep_alive_s=options.keep_alive_s,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            lanes.close()

    routes = routes_of(service)
    app = FastAPI(
        title="inferd",
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=_middleware(options, routes, metrics),
    )
    for route in routes:
        app.router.add_route(route.path, route.handler, methods=[route.method])
    app.add_exception_handler(RequestError, _on_refusal)
    app.add_exception_handler(EngineDeadError, _on_refusal)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_no_route)
    return app


def routes_of(service: Service) -> tuple[Route, ...]:
    """Every route there is, each with its label."""
    chat, text, tokens = ChatApi(service), CompletionsApi(service), TokensApi(service)
    models, health = ModelsApi(service), HealthApi(service)
    return (
        Route("POST", "/v1/chat/completions", Access.KEY, chat.create),
        Route("POST", "/v1/completions", Access.KEY, text.create),
        Route("GET", "/v1/models", Access.KEY, models.list),
        Route("GET", "/v1/models/{model_id:path}", Access.KEY, models.get),
        Route("POST", "/tokenize", Access.KEY, tokens.tokenize),
        Route("POST", "/detokenize", Access.KEY, tokens.detokenize),
        Route("GET", "/health", Access.PUBLIC, health.ready),
        Route("GET", "/live", Access.PUBLIC, health.live),
        Route("GET", "/ready", Access.PUBLIC, health.ready),
        Route("GET", "/version", Access.PUBLIC, health.version),
        Route("GET", "/metrics", Access.PUBLIC, health.metrics),
        Route("GET", "/state", Access.PUBLIC, StateApi(service).get),
    )


def _middleware(options: AppOptions, routes: tuple[Route, ...], metrics: Metrics) -> list[Middleware]:
    """Outermost first. CORS answers preflights, which carry no key, before keys are asked for."""
    public_paths = [route.path for route in routes if route.access is Access.PUBLIC]
    templates = [route.path for route in routes]
    layers = [Middleware(middleware.RequestIds), Middleware(middleware.Tally, metrics=metrics, templates=templates)]
    if options.has_access_log:
        layers.append(Middleware(middleware.AccessLog, quiet_paths=public_paths))
    layers.append(Middleware(middleware.LastResort))
    if options.cors_origins:
        allowed = ("GET", "POST")
        exposed = ("x-request-id", "retry-after", "retry-after-ms")
        origins = list(options.cors_origins)
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=allowed,
                allow_headers=("*",),
                expose_headers=exposed,
            )
        )
    layers.append(Middleware(middleware.Keys, keys=options.api_keys, public_paths=public_paths))
    layers.append(Middleware(middleware.BodyLimit, max_bytes=options.max_body_bytes))
    return layers


async def _on_refusal(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, (RequestError, EngineDeadError))
    return errors.response_of(error)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; the access line does."""
    del request, error
    return Response(status_code=499)


async def _on_no_route(request: Request, error: Exception) -> Response:
    """No such path, or a path without this method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {errors.clip(request.url.path, errors.MAX_ECHO)}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = (
            f"Not allowed to {where}: allowed is {allowed}. (HINT: Perhaps you meant to use a different HTTP method?)"
        )
        response = errors.response_of(RequestError("method_not_supported", message))
        response.headers["Allow"] = allowed
        return response
    return errors.response_of(RequestError("invalid_url", f"Invalid URL ({where})"))
