"""The routes that embed in the forms of other servers, and that tell their clients what is served, as data."""

from __future__ import annotations

from inferd.server.endpoints.body import ModelQuery
from inferd.server.endpoints.route import Access, Area, Route
from inferd.server.schema.answers import catalogs
from inferd.server.schema.answers import embeddings as answers
from inferd.server.schema.embedding_dialects import (
    CohereEmbedRequest,
    LlamaCppEmbeddingRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaShowRequest,
    PoolingRequest,
    TeiEmbedRequest,
)
from inferd.server.schema.request_model import RequestModel


def _route(path: str, about: str, answer: object, fields: type[RequestModel]) -> Route:
    return Route("POST", path, Access.KEY, Area.GENERATING, about, answer, fields, operation="embeddings")


POOLING = _route(
    "/pooling", "Turn texts, or each of their tokens, into vectors, as vLLM does.", answers.Pooled, PoolingRequest
)
COHERE_V1 = _route("/v1/embed", "Turn texts into vectors, as Cohere did.", answers.CohereEmbedded, CohereEmbedRequest)
COHERE_V2 = _route(
    "/v2/embed",
    "Turn texts into vectors of one type or several, as Cohere does.",
    answers.CohereEmbedded,
    CohereEmbedRequest,
)
TEI_EMBED = _route(
    "/embed", "Turn texts into vectors, as text-embeddings-inference does.", list[list[float]], TeiEmbedRequest
)
TEI_EMBED_ALL = _route(
    "/embed_all",
    "Turn each token of texts into a vector, as text-embeddings-inference does.",
    list[list[list[float]]],
    TeiEmbedRequest,
)
OLLAMA_EMBED = _route(
    "/api/embed", "Turn texts into vectors, as Ollama does.", answers.OllamaEmbedded, OllamaEmbedRequest
)
OLLAMA_EMBEDDINGS = _route(
    "/api/embeddings", "Turn a text into a vector, as Ollama did.", answers.OllamaEmbedding, OllamaEmbeddingsRequest
)
LLAMA_CPP = _route(
    "/embedding",
    "Turn texts into vectors, as llama.cpp's server does.",
    list[answers.LlamaCppEmbedding],
    LlamaCppEmbeddingRequest,
)
TEI_INFO = Route(
    "GET",
    "/info",
    Access.KEY,
    Area.MODELS,
    "The model that embeds or judges, as text-embeddings-inference tells it.",
    catalogs.TeiInfo,
    query=ModelQuery,
)
OLLAMA_TAGS = Route(
    "GET", "/api/tags", Access.KEY, Area.MODELS, "The models that embed, as Ollama lists them.", catalogs.OllamaModels
)
OLLAMA_SHOW = Route(
    "POST",
    "/api/show",
    Access.KEY,
    Area.MODELS,
    "One of these models, as Ollama describes it.",
    catalogs.OllamaShown,
    OllamaShowRequest,
)
CATALOGS = (TEI_INFO, OLLAMA_TAGS, OLLAMA_SHOW)
IN_OTHER_FORMS = (
    POOLING, COHERE_V1, COHERE_V2, TEI_EMBED, TEI_EMBED_ALL, OLLAMA_EMBED, OLLAMA_EMBEDDINGS, LLAMA_CPP,
)  # fmt: skip
