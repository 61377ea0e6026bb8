"""The answers of the routes that embed."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Literal, NotRequired

from inferd.server.errors.answer import Answer

Vector = Sequence[float] | Sequence[int] | str
"""Components of a vector, or the base64 of their bytes, little-endian."""


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    """Index of the input."""
    embedding: NotRequired[Vector]
    """Components of the vector. With `encoding_format` base64, their bytes, little-endian."""
    embeddings: NotRequired[Sequence[Vector] | str]
    """With `return_multivector`, instead of `embedding`: a vector for each token, or the base64 of all."""


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Answer):
    """One vector for each input, or one for each of its tokens."""

    object: Literal["list"]
    data: Sequence[Embedding]
    model: str
    """Name of the model, as the request wrote it."""
    usage: EmbeddingUsage


class PooledItem(Answer):
    index: int
    object: Literal["pooling"]
    data: Vector | Sequence[Vector]
    """The input's vector, or those of its tokens."""


class PoolingUsage(EmbeddingUsage):
    completion_tokens: Literal[0]
    prompt_tokens_details: None


class Pooled(Answer):
    """Answer of /pooling."""

    id: str
    object: Literal["list"]
    created: int
    """Unix seconds."""
    model: str
    data: Sequence[PooledItem]
    usage: PoolingUsage


class CohereVectors(Answer):
    """The vectors of each type that the request names."""

    float: NotRequired[Sequence[Sequence[builtins.float]]]
    int8: NotRequired[Sequence[Sequence[int]]]
    uint8: NotRequired[Sequence[Sequence[int]]]
    binary: NotRequired[Sequence[Sequence[int]]]
    ubinary: NotRequired[Sequence[Sequence[int]]]
    base64: NotRequired[Sequence[str]]


class CohereVersion(Answer):
    version: Literal["1", "2"]


class CohereUnits(Answer):
    input_tokens: int


class CohereMeta(Answer):
    api_version: CohereVersion
    billed_units: CohereUnits


class CohereEmbedded(Answer):
    """Answer of Cohere's /v1/embed and /v2/embed."""

    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    id: str
    embeddings: CohereVectors | Sequence[Sequence[builtins.float]]
    """A list, if a request to /v1/embed names no types."""
    texts: Sequence[str]
    meta: CohereMeta


class OllamaEmbedded(Answer):
    """Answer of Ollama's /api/embed."""

    model: str
    embeddings: Sequence[Sequence[builtins.float]]
    total_duration: int
    """Nanoseconds."""
    load_duration: Literal[0]
    prompt_eval_count: int
    """Number of tokens of all inputs."""


class OllamaEmbedding(Answer):
    """Answer of Ollama's /api/embeddings."""

    embedding: Sequence[builtins.float]


class LlamaCppEmbedding(Answer):
    index: int
    embedding: Sequence[Sequence[builtins.float]]
    """One vector."""
