"""The answers of the routes that tell what is served in the forms of text-embeddings-inference and Ollama."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired

from inferd.server.errors.answer import Answer


class TeiLabels(Answer):
    id2label: Mapping[str, str]
    """Name of each label by its number."""
    label2id: Mapping[str, int]


class TeiEmbedding(Answer):
    pooling: str


class TeiModelType(Answer):
    """One of the three."""

    embedding: NotRequired[TeiEmbedding]
    classifier: NotRequired[TeiLabels]
    reranker: NotRequired[TeiLabels]
    """A model that gives a pair one score. One that judges by tokens of its answer has no labels."""


class TeiInfo(Answer):
    """Answer of /info of text-embeddings-inference."""

    model_id: str
    """Name of the model."""
    model_sha: None
    model_dtype: str
    model_type: TeiModelType
    max_concurrent_requests: int
    """Most texts in one step of the engine."""
    max_input_length: int
    """Most tokens of a text."""
    max_batch_tokens: int
    """Most tokens of one request that the engine has at a time."""
    max_batch_requests: None
    max_client_batch_size: int
    """Most texts of a request."""
    auto_truncate: Literal[False]
    """A text is cut if its request asks for that."""
    version: str
    """Version of inferd."""
    sha: None
    docker_label: None


class OllamaDetails(Answer):
    parent_model: Literal[""]
    format: Literal["gguf", "safetensors"]
    family: str
    """`model_type` of the checkpoint's config.json."""
    families: Sequence[str]
    quantization_level: NotRequired[str]
    """Format of the weights, once they are loaded."""


class OllamaModel(Answer):
    name: str
    """Name of the model with its tag: `latest` if it has none."""
    model: str
    """The same."""
    modified_at: str
    """Time at which the server read the model."""
    size: NotRequired[int]
    """Bytes of the weights in memory, once they are loaded."""
    details: OllamaDetails


class OllamaModels(Answer):
    """Answer of Ollama's /api/tags: the models that embed, because no other route of Ollama is served."""

    models: Sequence[OllamaModel]


class OllamaShown(Answer):
    """Answer of Ollama's /api/show."""

    modified_at: str
    """Time at which the server read the model."""
    details: OllamaDetails
    model_info: Mapping[str, str | int]
    """`general.architecture`, and under that name `context_length`, and `embedding_length` once it is loaded."""
    capabilities: Sequence[Literal["embedding"]]
    """The uses of the model on the routes of Ollama that are served."""
    template: Literal[""]
    parameters: Literal[""]
