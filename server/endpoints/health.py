"""/live, /ready, /health, /version and /metrics, for orchestrators and scrapers. They need no key and do not queue."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.server.dispatch.model_lifecycle import State
from inferd.server.endpoints.cached_answer import CachedAnswer, asks_for_fresh
from inferd.server.endpoints.respond import check_ready
from inferd.server.endpoints.service import Services
from inferd.server.endpoints.state import status_of
from inferd.server.errors import messages as errors
from inferd.server.observability.metrics import Page
from inferd.server.schema.answers.operation import Liveness, Readiness, Version


class HealthApi:
    """The routes' handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._page = CachedAnswer(self._page_pieces)

    async def live(self, request: Request) -> Response:
        """Says that the server process answers. The engine may be down."""
        del request
        return _json({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """Says that requests are accepted, even if they wait for an engine, or have an unloaded model loaded. Otherwise
        raises `RequestError` (503)."""
        del request
        models = {service.model.names[0]: service.router.lifecycle for service in self._services}
        # One that failed or is asleep is one of `models`, and the server is ready without it.
        away = (State.FAILED, State.PAUSED, State.SLEEPING)
        served = {name: lifecycle for name, lifecycle in models.items() if lifecycle.state not in away}
        for name, lifecycle in (served or models).items():
            check_ready(lifecycle, name)
            if lifecycle.is_leaving:
                raise errors.leaving()
        is_recovering = any(lifecycle.state is State.RECOVERING for lifecycle in models.values())
        answer: Readiness = {
            "status": "recovering" if is_recovering else "ready",
            "models": {name: status_of(lifecycle) for name, lifecycle in models.items()},
        }
        return _json(answer)

    async def version(self, request: Request) -> Response:
        del request
        return _json({"version": self._services.first.version})

    async def metrics(self, request: Request) -> Response:
        """The page of at most a second ago. Both of its formats are made together, so they share that second."""
        page = await self._page.get(is_fresh=asks_for_fresh(request))
        body, content_type = page.answer(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    def _page_pieces(self) -> Generator[None, None, Page]:
        metrics = self._services.first.metrics
        metrics.num_tasks(len(asyncio.all_tasks()))
        for service in self._services:
            router = service.router
            service.metrics.sleeps(router.sleeping.level)
            service.metrics.requests_held(router.streams.held)
            service.metrics.tenants_waiting(router.streams.num_waiting_by_tenant())
            if router.adapters.num_places:
                service.metrics.adapter_requests(router.streams.adapter_requests(), router.adapters.num_places)
            yield
        return (yield from metrics.page_pieces())


def _json(value: Liveness | Readiness | Version) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
