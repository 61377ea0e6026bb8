"""/info of text-embeddings-inference, and /api/tags and /api/show of Ollama, by which clients learn what is served.

Ollama's answers leave out what is not known before the weights are loaded. Clients of /info need each of its fields, so
it is refused until then.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.engine.api.gguf import is_gguf
from inferd.engine.api.wire.messages import Ready
from inferd.server.endpoints import embedding_routes as routes
from inferd.server.endpoints.admin import Handler
from inferd.server.endpoints.body import body_of
from inferd.server.endpoints.route import Route
from inferd.server.endpoints.service import Service, Services
from inferd.server.errors import messages as errors
from inferd.server.generate.inputs import MAX_TOKENS_AT_ONCE
from inferd.server.schema.answers.catalogs import (
    OllamaDetails,
    OllamaModel,
    OllamaModels,
    OllamaShown,
    TeiInfo,
    TeiLabels,
    TeiModelType,
)
from inferd.server.schema.embedding_dialects import OllamaShowRequest
from inferd.server.schema.generation import MAX_PROMPTS
from inferd.server.text.model import ServedModel

_LATEST = ":latest"
_LEVELS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Dtype of weights -> its name in Ollama's answers."""


class CatalogsApi:
    """The routes' handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def handlers(self) -> dict[Route, Handler]:
        """The handler of each route."""
        return {routes.TEI_INFO: self.info, routes.OLLAMA_TAGS: self.tags, routes.OLLAMA_SHOW: self.show}

    async def info(self, request: Request) -> Response:
        """The model that `?model=` names, or the first that is made to embed or to judge. Raises `RequestError`, also
        for a model that only generates, and `EngineDeadError` before the first engine is ready."""
        name = request.query_params.get("model")
        service = (
            self._services.made_for(None, lambda each: each.is_made_to_embed, lambda each: each.is_made_to_judge)
            if name is None
            else self._services.named(name)
        )
        model, ready = service.model, service.router.replicas.ready
        if model.task == "generate" and not ready.num_labels:
            shown = errors.clip(model.names[0], errors.MAX_ECHO)
            message = (
                f"The model '{shown}' was made to generate, and /info tells models that were made to embed or to judge "
                "texts. GET /v1/models for the others."
            )
            raise RequestError("invalid_value", message, "model")
        answer: TeiInfo = {
            "model_id": model.names[0],
            "model_sha": None,
            "model_dtype": ready.dtype,
            "model_type": _kind(model, ready),
            "max_concurrent_requests": ready.max_num_seqs,
            "max_input_length": _longest(model),
            "max_batch_tokens": MAX_TOKENS_AT_ONCE,
            "max_batch_requests": None,
            "max_client_batch_size": MAX_PROMPTS,
            "auto_truncate": False,
            "version": service.version,
            "sha": None,
            "docker_label": None,
        }
        return _json(answer)

    async def tags(self, request: Request) -> Response:
        del request
        found = [_listed(service, name) for service in self._services for name in service.model.names
                 if service.model.is_made_to_embed]  # fmt: skip
        answer: OllamaModels = {"models": found}
        return _json(answer)

    async def show(self, request: Request, body: Annotated[OllamaShowRequest, body_of(OllamaShowRequest)]) -> Response:
        """Raises `RequestError`."""
        del request
        name = name_by_ollama(self._services, body.model)
        service = self._services.made_for(name, lambda each: each.is_made_to_embed)
        service.intake.check_model(name)
        model, ready = service.model, _ready(service)
        known: dict[str, str | int] = {
            "general.architecture": model.model_type,
            f"{model.model_type}.context_length": _longest(model),
        }
        if ready is not None:
            known[f"{model.model_type}.embedding_length"] = ready.hidden_size
        answer: OllamaShown = {
            "modified_at": _time(model),
            "details": _details(model, ready),
            "model_info": known,
            "capabilities": ["embedding"] if model.is_made_to_embed else [],
            "template": "",
            "parameters": "",
        }
        return _json(answer)


def name_by_ollama(services: Services, name: str | None) -> str | None:
    """The served name that Ollama would take for `name`: a name without a tag has the tag `latest`."""
    if name is None or name in services.names:
        return name
    other = name.removesuffix(_LATEST) if name.endswith(_LATEST) else f"{name}{_LATEST}"
    return other if other in services.names else name


def _kind(model: ServedModel, ready: Ready) -> TeiModelType:
    is_reranker = model.judges.gives_scores(ready.num_labels)
    if not ready.num_labels and not is_reranker:
        return {"embedding": {"pooling": model.embeds.pooling}}
    names = [model.judges.label(i) for i in range(ready.num_labels)]
    labels: TeiLabels = {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }
    return {"reranker": labels} if is_reranker else {"classifier": labels}


def _longest(model: ServedModel) -> int:
    """Most tokens of a text."""
    own = model.judges.max_tokens if model.is_made_to_judge else model.embeds.max_tokens
    return model.max_model_len if own is None else min(own, model.max_model_len)


def _listed(service: Service, name: str) -> OllamaModel:
    tagged, ready = name if ":" in name else name + _LATEST, _ready(service)
    listed: OllamaModel = {
        "name": tagged,
        "model": tagged,
        "modified_at": _time(service.model),
        "details": _details(service.model, ready),
    }
    if ready is not None:
        listed["size"] = ready.weights_bytes
    return listed


def _details(model: ServedModel, ready: Ready | None) -> OllamaDetails:
    details: OllamaDetails = {
        "parent_model": "",
        "format": "gguf" if is_gguf(model.path) else "safetensors",
        "family": model.model_type,
        "families": [model.model_type],
    }
    if ready is not None:
        is_plain = ready.quantization == "none"
        details["quantization_level"] = _LEVELS.get(ready.dtype, ready.dtype) if is_plain else ready.quantization
    return details


def _ready(service: Service) -> Ready | None:
    """The engine's own words about itself; None before it was ready."""
    try:
        return service.router.replicas.ready
    except EngineDeadError:
        return None


def _time(model: ServedModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat()


def _json(value: TeiInfo | OllamaModels | OllamaShown) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
