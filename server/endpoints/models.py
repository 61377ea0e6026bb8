"""/v1/models: the served names of each model, and its adapters, with its context length."""

from __future__ import annotations

import logging

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.server.dispatch.model_lifecycle import State
from inferd.server.endpoints.respond import while_asked
from inferd.server.endpoints.service import Service, Services
from inferd.server.endpoints.state import status_of
from inferd.server.errors import messages as errors
from inferd.server.schema.answers.operation import Model, ModelList

logger = logging.getLogger(__name__)


class ModelsApi:
    """The routes' handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def list(self, request: Request) -> Response:
        del request
        cards = [_card(service, name) for service in self._services for name in service.names]
        answer: ModelList = {"object": "list", "data": cards}
        return _json(answer)

    async def get(self, request: Request) -> Response:
        """Raises `RequestError` for a name that is not served."""
        name = request.path_params["model_id"]
        return _json(_card(self._services.named(name), name))

    async def load(self, request: Request) -> Response:
        """Answers when the model's engines take requests. Raises `RequestError` if they cannot."""
        service = self._named(request)
        await while_asked(request, None, service.router.loading.load())
        return _json(_card(service, request.path_params["model_id"]))

    async def unload(self, request: Request) -> Response:
        """Answers when the memory is free. Raises `RequestError` if requests run."""
        service = self._named(request)
        away, lifecycle = (State.UNLOADED, State.LOADING), service.router.lifecycle
        was_unloaded = lifecycle.state in away
        await service.router.loading.unload()
        if lifecycle.state in away and not was_unloaded:
            logger.info("%s: unloaded on request; the next request loads it", service.model.names[0])
        return _json(_card(service, request.path_params["model_id"]))

    def _named(self, request: Request) -> Service:
        """The model of a path, which names no adapter. Raises `RequestError`."""
        name = request.path_params["model_id"]
        service = self._services.of(name)
        if name not in service.model.names:
            raise errors.model_not_found(name, self._services.names_of_models)
        return service


def _card(service: Service, name: str) -> Model:
    model, adapter = service.model, service.router.adapters.named.get(name)
    card: Model = {
        "id": name,
        "object": "model",
        "created": model.created if adapter is None else adapter.created,
        "owned_by": "inferd",
        "root": model.root if adapter is None else adapter.path.name,
        "parent": None if adapter is None else model.names[0],
        "max_model_len": model.max_model_len,
        "context_length": model.max_model_len,
        "task": model.task,
    }
    lifecycle = service.router.lifecycle
    if lifecycle.is_asleep or lifecycle.state in (State.UNLOADED, State.LOADING, State.FAILED):
        card["status"] = status_of(lifecycle)
    if lifecycle.failure:
        card["error"] = lifecycle.failure
    return card


def _json(value: Model | ModelList) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
