"""/v1/models: the served names of the model, and its adapters, with its context length."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.server.api.service import Service
from inferd.server.errors import table as errors
from inferd.server.schema.answers.operation import Model, ModelList


class ModelsApi:
    """The routes' handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, request: Request) -> Response:
        del request
        answer: ModelList = {"object": "list", "data": [self._card(name) for name in self._names()]}
        return _json(answer)

    async def get(self, request: Request) -> Response:
        """Raises `RequestError` for a name that is not served."""
        name, served = request.path_params["model_id"], self._names()
        if name not in served:
            raise errors.model_not_found(name, served[0])
        return _json(self._card(name))

    def _names(self) -> tuple[str, ...]:
        return (*self._service.model.names, *self._service.router.adapters.named)

    def _card(self, name: str) -> Model:
        model, adapter = self._service.model, self._service.router.adapters.named.get(name)
        return {
            "id": name,
            "object": "model",
            "created": model.created if adapter is None else adapter.created,
            "owned_by": "inferd",
            "root": model.root if adapter is None else adapter.path.name,
            "parent": None if adapter is None else model.names[0],
            "max_model_len": model.max_model_len,
            "context_length": model.max_model_len,
        }


def _json(value: Model | ModelList) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
