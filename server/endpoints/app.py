"""Assembles the HTTP application: the table of routes, the middleware in its order, and the handlers of errors.

`create_app` receives everything that it needs; nothing here is global. It knows no engine and starts nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from pydantic import SecretStr
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.errors import ConfigError, EngineDeadError, RequestError
from inferd.server.auth.keyring import Keyring
from inferd.server.auth.quotas import RATE_LIMIT_HEADERS
from inferd.server.config.settings import Settings
from inferd.server.dispatch.router import Router
from inferd.server.endpoints import docs_page, routes
from inferd.server.endpoints.admin import AdminApi, Handler, admin_only, at_port, not_served
from inferd.server.endpoints.anthropic.routes import MessagesApi
from inferd.server.endpoints.catalogs import CatalogsApi
from inferd.server.endpoints.chat import ChatApi
from inferd.server.endpoints.completions import CompletionsApi
from inferd.server.endpoints.embedding_dialects import EmbeddingDialects
from inferd.server.endpoints.embeddings import EmbeddingsApi
from inferd.server.endpoints.gateways import GatewaysApi
from inferd.server.endpoints.health import HealthApi
from inferd.server.endpoints.llama_cpp import LlamaCppApi
from inferd.server.endpoints.models import ModelsApi
from inferd.server.endpoints.openapi import OpenApi, operation_of
from inferd.server.endpoints.responses.background import Background
from inferd.server.endpoints.responses.routes import ResponsesApi
from inferd.server.endpoints.responses.store import ResponseStore
from inferd.server.endpoints.route import Access, Route
from inferd.server.endpoints.scores import ScoresApi
from inferd.server.endpoints.service import Service, Services
from inferd.server.endpoints.sleep import SleepApi
from inferd.server.endpoints.state import StateApi
from inferd.server.endpoints.tokens import RenderApi, TokensApi
from inferd.server.endpoints.wrong_paths import way_out
from inferd.server.errors import messages as errors
from inferd.server.generate.intake import Intake
from inferd.server.generate.prompts import PromptReader
from inferd.server.observability.metrics import Metrics
from inferd.server.playground import page as playground
from inferd.server.schema.answers.operation import Config
from inferd.server.schema.latency import Targets
from inferd.server.structured.checker import GrammarChecker
from inferd.server.text.model import ServedModel
from inferd.server.text.text_threads import TextThreads
from inferd.server.transport import middleware
from inferd.server.transport.access import Keys, Origins, Quotas
from inferd.server.transport.freed_memory import FreedMemory
from inferd.server.transport.loop_probe import LoopProbe
from inferd.server.transport.sse import KEEP_ALIVE_S, ClientGoneError

if TYPE_CHECKING:
    from inferd.server.observability.tracing import Tracing


def settled(settings: Settings, config: EngineConfig | None) -> Config:
    return {
        name: {"value": value, "source": source, "became": getattr(config, _BECOMES.get(name, name), None)}
        for name, value, source in settings.explain()
    }


_BECOMES = {"kv_memory": "kv_memory_bytes"}
"""Setting -> its name in the engine's configuration, if that differs."""


_READ_BY_PAGES = (
    "x-request-id",
    "request-id",
    middleware.WARNING_HEADER,
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    *RATE_LIMIT_HEADERS,
)
"""Headers of answers that the scripts of a web page may read."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One model, and what serves it."""

    model: ServedModel
    router: Router
    metrics: Metrics
    settings: Settings
    """The settings of this model. Those of the first model apply to the whole server too."""
    config: EngineConfig | None = None
    """The engine's settings, as far as they are resolved."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the weight files by name, as far as they are known."""


def create_app(
    *backends: Backend, admin_port: int | None = None, keep_alive_s: float = KEEP_ALIVE_S, body_idle_s: float = 10.0
) -> FastAPI:
    """The ASGI application for one or more models. Its threads and processes end with its lifespan.

    `admin_port`: the local port that serves admin routes and public ones, but no others; None: each port serves all.
    `keep_alive_s`: most seconds of silence in a stream. `body_idle_s`: most seconds without a byte of a body.
    """
    threads, background = TextThreads(), Background()
    model, metrics, settings = backends[0].model, backends[0].metrics, backends[0].settings
    for backend in backends[1:]:
        metrics.show_beside(backend.metrics)
    probe = LoopProbe(metrics.loop_lag)

    def show_tenants(names: Mapping[str, str]) -> None:
        for backend in backends:
            backend.metrics.tenants_known(names)

    keyring = Keyring(
        _revealed(settings.api_key),
        _revealed(settings.admin_key),
        None if settings.keys_file is None else Path(settings.keys_file),
        metrics.keys_read,
        metrics.keys_age,
        show_tenants,
    )
    tracing = _tracing(settings, model.names[0])
    models = [backend.model for backend in backends]
    all_grammars = [
        GrammarChecker(each.path, each.vocab_size, files=each.files, vocabulary=each.vocabulary) for each in models
    ]
    responses = ResponseStore(settings.stored_responses, settings.stored_responses_ttl_s)
    services = Services(
        [
            _service(backend, threads, background, responses, grammars, keep_alive_s)
            for backend, grammars in zip(backends, all_grammars, strict=True)
        ]
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        probe.start()
        tasks = [asyncio.create_task(work) for work in (keyring.watch(), FreedMemory().keep_giving_back())]
        try:
            yield
        finally:
            probe.stop()
            for task in tasks:
                task.cancel()
            await background.close()
            for grammars in all_grammars:
                await grammars.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
            for service in services:
                service.prompts.close()
            threads.close()

    table = routes.ROUTES + (routes.PAGE if settings.playground else ())
    app = FastAPI(
        title="inferd",
        openapi_url=None,  # the table of routes has the document
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=_middleware(settings, metrics, keyring, table, tracing, body_idle_s),
    )
    app.state.services = services
    add_routes(app, table, handlers_of(services), admin_port)
    check_labels(app, table)
    app.add_exception_handler(RequestError, _on_refusal)
    app.add_exception_handler(EngineDeadError, _on_refusal)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_no_route)
    return app


def _service(
    backend: Backend,
    threads: TextThreads,
    background: Background,
    responses: ResponseStore,
    grammars: GrammarChecker,
    keep_alive_s: float,
) -> Service:
    model, settings = backend.model, backend.settings
    targets = Targets(settings.ttft_target, settings.tpot_target)
    prompts = PromptReader(model, threads)
    return Service(
        model=model,
        router=backend.router,
        metrics=backend.metrics,
        intake=Intake(model, prompts, grammars, targets, backend.router.adapters),
        prompts=prompts,
        threads=threads,
        responses=responses,
        background=background,
        version=version("inferd"),
        unknown_fields=settings.unknown_fields,
        keep_alive_s=keep_alive_s,
        targets=targets,
        e2e_target_s=settings.e2e_target,
        weights=backend.weights,
        config=settled(settings, backend.config),
    )


def handlers_of(services: Services) -> dict[Route, Handler]:
    """The handler of each route in the table, except routes that answer 501."""
    chat, text, tokens = ChatApi(services), CompletionsApi(services), TokensApi(services)
    models, health, admin = ModelsApi(services), HealthApi(services), AdminApi(services)
    render, messages, judging = RenderApi(services), MessagesApi(services), ScoresApi(services)
    sleep, responses = SleepApi(services), ResponsesApi(services)
    gateways, llama_cpp = GatewaysApi(services), LlamaCppApi(services)
    return {
        routes.CHAT: chat.create,
        routes.CHAT_RENDER: render.chat,
        routes.COMPLETIONS: text.create,
        routes.COMPLETIONS_RENDER: render.completions,
        routes.INFILL: llama_cpp.infill,
        routes.PROPS: llama_cpp.props,
        routes.MESSAGES: messages.create,
        routes.COUNT_TOKENS: messages.count_tokens,
        routes.RESPONSES: responses.create,
        routes.RESPONSE: responses.get,
        routes.DELETE_RESPONSE: responses.delete,
        routes.CANCEL_RESPONSE: responses.cancel,
        routes.RESPONSE_ITEMS: responses.input_items,
        routes.EMBEDDINGS: EmbeddingsApi(services).create,
        **dict.fromkeys(routes.RERANKS, judging.rerank),
        **dict.fromkeys(routes.SCORES, judging.score),
        **dict.fromkeys(routes.CLASSIFIES, judging.classify),
        routes.PREDICT: judging.predict,
        **EmbeddingDialects(services).handlers(),
        **CatalogsApi(services).handlers(),
        routes.TOKENIZE: tokens.tokenize,
        routes.DETOKENIZE: tokens.detokenize,
        routes.TOKENIZER_INFO: tokens.info,
        routes.MODELS: models.list,
        routes.MODEL: models.get,
        routes.LOAD_MODEL: models.load,
        routes.UNLOAD_MODEL: models.unload,
        routes.HEALTH: health.ready,
        routes.READY: health.ready,
        routes.LIVE: health.live,
        routes.VERSION: health.version,
        routes.METRICS: health.metrics,
        routes.STATE: StateApi(services).get,
        routes.LOADS: gateways.loads,
        routes.SERVER_INFO: gateways.server_info,
        routes.MODEL_INFO: gateways.model_info,
        routes.OPENAPI: OpenApi(services.first).get,
        routes.DOCS: docs_page.page,
        **dict.fromkeys(routes.DOCS_FILES, docs_page.file),
        **dict.fromkeys(routes.PAGE, playground.file),
        routes.CONFIG: admin.config,
        routes.RESET_PREFIX_CACHE: admin.reset_prefix_cache,
        routes.LOAD_LORA: admin.load_adapter,
        routes.UNLOAD_LORA: admin.unload_adapter,
        routes.SLEEP: sleep.sleep,
        routes.WAKE_UP: sleep.wake_up,
        routes.IS_SLEEPING: sleep.is_sleeping,
    }


def add_routes(
    app: FastAPI, table: Sequence[Route], handlers: Mapping[Route, Handler], admin_port: int | None = None
) -> None:
    """Serve every route of the table with its access label. Raises `RuntimeError` if table and handlers differ."""
    served = {route for route in (*table, *routes.PAGE) if not route.missing}
    if set(handlers) != served:
        paths = sorted(f"{route.method} {route.path}" for route in set(handlers) ^ served)
        raise RuntimeError(f"a row of the table without a handler, or a handler without a row: {', '.join(paths)}")
    for route in table:
        handler = not_served(route.missing) if route.missing else handlers[route]
        checks = []
        if admin_port is not None and route.access is not Access.PUBLIC and not route.missing:
            checks.append(Depends(at_port(admin_port, is_there=route.access is Access.ADMIN)))
        if route.access is Access.ADMIN:
            checks.append(Depends(admin_only))
        add = partial(app.router.add_api_route, route.path, handler, dependencies=checks, response_class=Response)
        add(methods=[route.method], include_in_schema=route not in routes.PAGE, **operation_of(route))
        if route.method == "GET":
            add(methods=["HEAD"], include_in_schema=False)


def check_labels(app: FastAPI, table: Sequence[Route]) -> None:
    """Raises `RuntimeError` if the app serves a route that is not in the table."""
    labelled = {route.path for route in table}
    unlabelled = [getattr(route, "path", route) for route in app.routes if getattr(route, "path", None) not in labelled]
    if unlabelled:
        raise RuntimeError(f"these routes have no access label: {unlabelled}")


def _revealed(keys: Iterable[SecretStr]) -> tuple[str, ...]:
    return tuple(key.get_secret_value() for key in keys)


def _tracing(settings: Settings, model: str) -> Tracing | None:
    """Raises `ConfigError` if the settings ask for traces and their library is missing."""
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        from inferd.server.observability.tracing import Tracing  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'inferd[otel]', or leave it out"
        ) from error
    return Tracing(settings.otlp_traces_endpoint, model, version("inferd"))


def _middleware(
    settings: Settings,
    metrics: Metrics,
    keyring: Keyring,
    table: Sequence[Route],
    tracing: Tracing | None,
    body_idle_s: float,
) -> list[Middleware]:
    """The middleware, outermost first. CORS comes before the check of keys, because preflights carry no key. It lets
    web pages read all later answers, errors included."""
    public_paths = [route.path for route in table if route.access is Access.PUBLIC]
    templates = [route.path for route in table]
    layers = [
        Middleware(middleware.RequestIds),
        Middleware(middleware.AnswerMetrics, metrics=metrics, templates=templates),
    ]
    if tracing is not None:
        from inferd.server.observability.tracing import Traces  # noqa: PLC0415

        operations = {route.path: route.operation for route in table if route.operation}
        layers.append(Middleware(Traces, tracing=tracing, operations=operations))
    if settings.access_log:
        layers.append(Middleware(middleware.AccessLog, quiet_paths=public_paths))
    origins, hosts = settings.allowed_origins, settings.allowed_hosts if settings.trusts_this_machine else None
    layers.append(Middleware(Origins, allowed_origins=origins, allowed_hosts=hosts, asks_keys=not keyring.is_open))
    if origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                allow_private_network=True,
                expose_headers=_READ_BY_PAGES,
            )
        )
    layers.append(Middleware(middleware.LastResort))
    layers.append(Middleware(Keys, keyring=keyring, public_paths=public_paths))
    layers.append(Middleware(Quotas, paths=[route.path for route in table if route.is_metered]))
    layers.append(Middleware(middleware.BodyLimit, max_bytes=settings.max_body_bytes, idle_s=body_idle_s))
    return layers


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, (RequestError, EngineDeadError))
    return middleware.refusal(request.scope, error)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """The client has gone, so only the access log sees this answer."""
    del request, error
    return Response(status_code=499)


async def _on_no_route(request: Request, error: Exception) -> Response:
    """There is no such path, or the path has no such method."""
    assert isinstance(error, HTTPException)
    target = f"{request.method} {errors.clip(request.url.path, errors.MAX_ECHO)}"
    if error.status_code == 405:
        allowed = ", ".join(routes.methods_of(request.scope["path"]))
        message = (
            f"Not allowed to {target}: allowed is {allowed}. (HINT: Perhaps you meant to use a different HTTP method?)"
        )
        error_here = RequestError("method_not_supported", message)
        is_websocket = request.headers.get("upgrade", "").lower() == "websocket"
        if is_websocket:  # clients that would use one take another way at once if the status is 426
            error_here = RequestError("websocket_not_supported", f"No WebSocket at {target}: use {allowed} instead.")
        response = middleware.refusal(request.scope, error_here)
        response.headers["Allow"] = allowed
        if is_websocket:
            response.headers["Upgrade"] = "HTTP/1.1"
        return response
    meant = way_out(request.method, middleware.route_path(request.scope), request.scope.get("root_path", ""))
    return middleware.refusal(
        request.scope, RequestError("invalid_url", f"Invalid URL ({target}){meant and '.'}{meant}")
    )
