"""Embeddings as other servers give them: vLLM's /pooling, Cohere, text-embeddings-inference, Ollama and llama.cpp.

Each route translates its request into that of /v1/embeddings, and writes the same vectors in its own form. Errors have
OpenAI's form on all of them. /embeddings of llama.cpp's server is not served: clients of OpenAI's ask that path if
their base URL lacks /v1.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.server.endpoints import embedding_routes as routes
from inferd.server.endpoints.admin import Handler
from inferd.server.endpoints.body import body_of
from inferd.server.endpoints.catalogs import name_by_ollama
from inferd.server.endpoints.embeddings import Embedded, Embedder, kind_of
from inferd.server.endpoints.route import Route
from inferd.server.endpoints.scores import CLASSES, ScoresApi
from inferd.server.endpoints.service import Services
from inferd.server.endpoints.vectors import VectorForm
from inferd.server.errors import messages as errors
from inferd.server.schema.answers.embeddings import (
    CohereEmbedded,
    LlamaCppEmbedding,
    OllamaEmbedded,
    OllamaEmbedding,
    Pooled,
)
from inferd.server.schema.classes import ClassifyRequest
from inferd.server.schema.embedding_dialects import (
    CohereEmbedRequest,
    LlamaCppEmbeddingRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    PoolingRequest,
    TeiEmbedRequest,
)
from inferd.server.schema.embeddings import EmbeddingRequest, Side, VectorType

_OF_VECTORS = (
    "dimensions", "pooling", "prompt_name", "input_type", "return_multivector", "output_dtype", "embedding_types",
    "truncation_side",
)  # fmt: skip
"""Fields of a request for pooled states that have no part in classes."""
_OF_BOTH = ("add_special_tokens", "truncate_prompt_tokens", "priority", "timeout", "user")
_TRUNCATES = "set 'truncate' to true"


class EmbeddingDialects:
    """The routes' handlers. Each raises `RequestError`, `EngineDeadError` and `ClientGoneError`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._embedder, self._judging = Embedder(services), ScoresApi(services)

    def handlers(self) -> dict[Route, Handler]:
        """The handler of each route."""
        return {
            routes.POOLING: self.pooling,
            routes.COHERE_V1: self.cohere_v1,
            routes.COHERE_V2: self.cohere_v2,
            routes.TEI_EMBED: self.tei_embed,
            routes.TEI_EMBED_ALL: self.tei_embed_all,
            routes.OLLAMA_EMBED: self.ollama_embed,
            routes.OLLAMA_EMBEDDINGS: self.ollama_embeddings,
            routes.LLAMA_CPP: self.llama_cpp,
        }

    async def pooling(self, request: Request, body: Annotated[PoolingRequest, body_of(PoolingRequest)]) -> Response:
        """vLLM's /pooling."""
        if body.task == "classify" or (body.task is None and self._classifies(body.model)):
            return await self._classes(request, body)
        return await self._embedder.answer(
            request,
            body,
            lambda embedded: _pooled(embedded.name, embedded.values[0], embedded.num_tokens),
            kinds=(kind_of(body),),
            is_base64=(body.encoding_format == "base64",),
            per_token=body.task == "token_embed" or bool(body.return_multivector),
        )

    def _classifies(self, name: str | None) -> bool:
        """Whether the model gives classes and no vectors, if the request does not say what it wants."""
        model = self._services.made_for(name, lambda model: model.is_made_to_embed, *CLASSES).model
        return model.has_classes

    async def _classes(self, request: Request, body: PoolingRequest) -> Response:
        for name in _OF_VECTORS:
            if getattr(body, name) is not None:
                raise errors.unsupported_parameter(name, "Classes are no vectors: leave it out.")
        asked = ClassifyRequest.model_construct(
            input=body.input,
            model=body.model,
            use_activation=body.normalize,  # its name in this request, too
            **{name: getattr(body, name) for name in _OF_BOTH},
        )
        form = VectorForm(is_base64=body.encoding_format == "base64")

        def render(name: str, rows: Sequence[bytes], num_tokens: int) -> Pooled:
            return _pooled(name, [orjson.Fragment(form.value(row)) for row in rows], num_tokens)

        return await self._judging.pool(request, asked, render)

    async def cohere_v1(
        self, request: Request, body: Annotated[CohereEmbedRequest, body_of(CohereEmbedRequest)]
    ) -> Response:
        """Cohere's /v1/embed."""
        return await self._cohere(request, body, "1")

    async def cohere_v2(
        self, request: Request, body: Annotated[CohereEmbedRequest, body_of(CohereEmbedRequest)]
    ) -> Response:
        """Cohere's /v2/embed."""
        return await self._cohere(request, body, "2")

    async def _cohere(self, request: Request, body: CohereEmbedRequest, version: Literal["1", "2"]) -> Response:
        texts, param = _texts_of(body)
        asked = tuple(dict.fromkeys(body.embedding_types or ("float",)))

        def render(embedded: Embedded) -> CohereEmbedded:
            by_type: Any = dict(zip(asked, embedded.values, strict=True))
            is_plain = version == "1" and body.embedding_types is None
            return {
                "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
                "id": secrets.token_hex(16),
                "embeddings": by_type["float"] if is_plain else by_type,
                "texts": texts,
                "meta": {
                    "api_version": {"version": version},
                    "billed_units": {"input_tokens": embedded.num_tokens},
                },
            }

        kinds: list[VectorType] = ["float" if kind == "base64" else kind for kind in asked]
        kept, side = _cut_of(body)
        translated = EmbeddingRequest.model_construct(
            input=texts,
            model=body.model,
            input_type=body.input_type,
            dimensions=body.output_dimension,
            truncate_prompt_tokens=kept,
            truncation_side=side,
        )
        return await self._embedder.answer(
            request,
            translated,
            render,
            kinds=kinds,
            is_base64=[kind == "base64" for kind in asked],
            param=param,
            way_to_cut="set 'truncate' to END" if body.truncate == "NONE" else "",
        )

    async def tei_embed(self, request: Request, body: Annotated[TeiEmbedRequest, body_of(TeiEmbedRequest)]) -> Response:
        """/embed of text-embeddings-inference."""
        return await self._tei(request, body, per_token=False)

    async def tei_embed_all(
        self, request: Request, body: Annotated[TeiEmbedRequest, body_of(TeiEmbedRequest)]
    ) -> Response:
        """/embed_all of text-embeddings-inference."""
        return await self._tei(request, body, per_token=True)

    async def _tei(self, request: Request, body: TeiEmbedRequest, *, per_token: bool) -> Response:
        side: Side = "left" if (body.truncation_direction or "").lower() == "left" else "right"
        translated = EmbeddingRequest.model_construct(
            input=body.inputs,
            model=body.model,
            prompt_name=body.prompt_name,
            dimensions=body.dimensions,
            normalize=not per_token if body.normalize is None else body.normalize,
            truncate_prompt_tokens=-1 if body.truncate else None,
            truncation_side=side,
        )
        return await self._embedder.answer(
            request,
            translated,
            lambda embedded: embedded.values[0],
            per_token=per_token,
            param="inputs",
            way_to_cut=_TRUNCATES,
        )

    async def ollama_embed(
        self, request: Request, body: Annotated[OllamaEmbedRequest, body_of(OllamaEmbedRequest)]
    ) -> Response:
        """Ollama's /api/embed."""

        def render(embedded: Embedded) -> OllamaEmbedded:
            vectors: Any = embedded.values[0]
            return {
                "model": body.model or embedded.name,
                "embeddings": vectors,
                "total_duration": int((time.monotonic() - request.state.arrival_s) * 1e9),
                "load_duration": 0,
                "prompt_eval_count": embedded.num_tokens,
            }

        translated = EmbeddingRequest.model_construct(
            input=body.input,
            model=name_by_ollama(self._services, body.model),
            dimensions=body.dimensions,
            normalize=True,
            truncate_prompt_tokens=None if body.truncate is False else -1,
        )
        return await self._embedder.answer(request, translated, render, way_to_cut=_TRUNCATES)

    async def ollama_embeddings(
        self, request: Request, body: Annotated[OllamaEmbeddingsRequest, body_of(OllamaEmbeddingsRequest)]
    ) -> Response:
        """Ollama's /api/embeddings."""

        def render(embedded: Embedded) -> OllamaEmbedding:
            vector: Any = embedded.values[0][0]
            return {"embedding": vector}

        name = name_by_ollama(self._services, body.model)
        translated = EmbeddingRequest.model_construct(input=(body.prompt,), model=name, truncate_prompt_tokens=-1)
        return await self._embedder.answer(request, translated, render, param="prompt")

    async def llama_cpp(
        self, request: Request, body: Annotated[LlamaCppEmbeddingRequest, body_of(LlamaCppEmbeddingRequest)]
    ) -> Response:
        """/embedding of llama.cpp's server."""

        def render(embedded: Embedded) -> list[LlamaCppEmbedding]:
            vectors: Any = embedded.values[0]
            return [{"index": i, "embedding": [vector]} for i, vector in enumerate(vectors)]

        translated = EmbeddingRequest.model_construct(
            input=body.content,
            model=body.model,
            normalize=None if body.embd_normalize is None else body.embd_normalize == 2,
        )
        return await self._embedder.answer(request, translated, render, param="content", way_to_cut="")


def _pooled(name: str, values: Sequence[orjson.Fragment], num_tokens: int) -> Pooled:
    items: Any = [{"index": i, "object": "pooling", "data": value} for i, value in enumerate(values)]
    return {
        "id": f"pool-{secrets.token_hex(16)}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": items,
        "usage": {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }


def _texts_of(body: CohereEmbedRequest) -> tuple[tuple[str, ...], str]:
    """(the texts, their parameter). Raises `RequestError`."""
    if body.texts is not None and body.inputs is not None:
        raise errors.invalid_value("inputs", "...", "Only one of 'texts' and 'inputs' can be given.")
    if body.inputs is not None:
        return tuple(each.content[0].text for each in body.inputs), "inputs"
    if body.texts is None:
        raise errors.missing("texts")
    return body.texts, "texts"


def _cut_of(body: CohereEmbedRequest) -> tuple[int | None, Side]:
    """(tokens that are kept of a text; None: all, and the side that is cut). Raises `RequestError`."""
    if body.truncate == "NONE":
        if body.max_tokens is not None:
            rule = "With 'truncate' NONE no text is cut: send START or END, or leave it out."
            raise errors.invalid_value("max_tokens", body.max_tokens, rule)
        return None, "right"
    kept = -1 if body.max_tokens is None else body.max_tokens
    return kept, "left" if body.truncate == "START" else "right"
