"""The answers of the routes for scores and classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NotRequired

from inferd.server.errors.answer import Answer
from inferd.server.schema.answers.embeddings import EmbeddingUsage


class RankedDocument(Answer):
    text: str


class RankedResult(Answer):
    """One document."""

    index: int
    """Place of the document in the request."""
    relevance_score: float
    """How well it answers the query; more is better."""
    document: NotRequired[RankedDocument]
    """Its text, if the request asks for it."""


class RerankUnits(Answer):
    search_units: int
    """1, as Cohere counts a query with its documents."""


class RerankTokens(Answer):
    input_tokens: int
    output_tokens: int


class RerankVersion(Answer):
    version: str
    """Version of Cohere's API."""


class RerankMeta(Answer):
    """Fields of Cohere's answers."""

    api_version: RerankVersion
    billed_units: RerankUnits
    tokens: RerankTokens


class Reranked(Answer):
    """Documents, the most relevant first."""

    id: str
    object: Literal["list"]
    model: str
    """Name of the model, as the request wrote it."""
    results: Sequence[RankedResult]
    usage: EmbeddingUsage
    meta: RerankMeta


class Rank(Answer):
    """One document, in the answer of text-embeddings-inference."""

    index: int
    """Place of the document in the request."""
    score: float
    text: NotRequired[str]
    """Its text, if `return_text` is true."""


class Score(Answer):
    index: int
    """Place of the pair in the request."""
    object: Literal["score"]
    score: float


class Scores(Answer):
    """A score for each pair."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    """Name of the model, as the request wrote it."""
    data: Sequence[Score]
    usage: EmbeddingUsage


class Classes(Answer):
    """The classes of one input."""

    index: int
    """Place of the input in the request."""
    label: str
    """Name of the likeliest class."""
    probs: Sequence[float]
    """A number for each class. With `use_activation` false they are logits."""
    num_classes: int


class Classified(Answer):
    """The classes of each input."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    """Name of the model, as the request wrote it."""
    data: Sequence[Classes]
    usage: EmbeddingUsage


class Prediction(Answer):
    """One class of an input, in the answer of text-embeddings-inference."""

    score: float
    label: str
    """Name of the class."""
