"""The requests for scores of pairs: /v1/rerank of Cohere, Jina and vLLM, /rerank of TEI, and /v1/score of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from inferd.server.errors import messages as errors
from inferd.server.schema.generation import MAX_PROMPTS
from inferd.server.schema.latency import priority_option, timeout_option
from inferd.server.schema.request_model import RequestModel, option, required
from inferd.server.schema.token_ids import check_array
from inferd.server.schema.values import Besides, Flag, JsonObject, Number, Only, ReadBy, Text, Whole

_TEXT_FORMS = "one of a string or an object with a string `text`"
_RIGHT = "Texts lose their end: leave it out."
_Document = Text | JsonObject
_Documents = Annotated[list[_Document], Field(min_length=1, max_length=MAX_PROMPTS)]
_Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]


def _text(value: Any, where: str) -> str:
    """A text, or the text of an object whose other keys are not read."""
    if isinstance(value, dict):
        if value.get("text") is None:
            raise errors.missing(f"{where}.text")
        where, value = f"{where}.text", value["text"]
        if not isinstance(value, str):
            raise errors.invalid_type(where, "a string", value)
    if not isinstance(value, str):
        raise errors.invalid_type(where, _TEXT_FORMS, value)
    return value


def _query(value: Any, where: str) -> str:
    text = _text(value, where)
    if not text:
        raise errors.empty_string(where)
    return text


def _documents(value: Any, where: str) -> tuple[str, ...]:
    check_array(value, where, "an array of strings or objects", 1, MAX_PROMPTS)
    return tuple(_text(item, f"{where}[{i}]") for i, item in enumerate(value))


def _one_or_many(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, list):
        check_array(value, where, "one of a string or an array of strings", 1, MAX_PROMPTS)
        return tuple(_text(item, f"{where}[{i}]") for i, item in enumerate(value))
    return (_text(value, where),)


OneOrMany = Annotated[tuple[str, ...], ReadBy(_one_or_many, _Document | _Documents)]


class JudgingFields(RequestModel):
    """Fields of every request for scores or classes."""

    model: Text | None = option("The name of the served model; any other is a 404.", unset="the served model")
    truncate_prompt_tokens: Annotated[Whole | None, Field(ge=1), Besides(-1, -1)] = option(
        "Most tokens of a text or a pair, which loses its end; -1: as many as the model reads. The longer text of a "
        "pair is cut. If neither this nor `truncate` is given, an input that is too long is refused.",
        unset="never cut",
    )
    truncate: Flag | None = option("True is -1 for `truncate_prompt_tokens`.", unset="false")
    truncation_direction: Literal["right", "Right"] | None = option("Texts lose their end.", has_effect=False)
    use_activation: Flag | None = option(
        "True: scores from 0 to 1, or probabilities of classes. False: the model's logits.",
        unset="as the model's folder says, else true",
    )
    priority: Whole | None = priority_option()
    timeout: Number | None = timeout_option()
    user: Text | None = option("Clients are identified by their key.", has_effect=False)

    aliases: ClassVar[Mapping[str, str]] = {"activation": "use_activation", "truncation_side": "truncation_direction"}

    @property
    def wants_activation(self) -> bool | None:
        """Whether scores and classes are probabilities; None: as the model's folder says."""
        return self.use_activation

    @property
    def logits_option(self) -> tuple[str, str]:
        """(the field, its value) that asks for the logits."""
        return "use_activation", "false"

    @property
    def cut_option(self) -> tuple[str, str]:
        """(the field, its value) that asks for inputs to be cut."""
        return "truncate_prompt_tokens", "-1"


def activation_by_tei(raw_scores: bool | None, use_activation: bool | None) -> bool:
    """`wants_activation` of a request of text-embeddings-inference: scores are from 0 to 1, whatever the folder says,
    unless it asks for raw ones."""
    return use_activation is not False if raw_scores is None else not raw_scores


class ScoringFields(JudgingFields):
    """Fields of every request for scores."""

    instruction: Text | None = option(
        "The task, for rerankers whose prompt has a place for it, such as Qwen3-Reranker.", unset="the model's own"
    )
    max_tokens_per_doc: Whole | None = option(
        "Most tokens of each second text, which loses its end. A pair that is still too long is cut, too.",
        unset="no bound of its own",
        ge=1,
    )

    aliases: ClassVar[Mapping[str, str]] = {**JudgingFields.aliases, "instruct": "instruction"}


class RerankRequest(ScoringFields):
    """A query, and documents to sort by how well they answer it."""

    query: Annotated[str, ReadBy(_query, _Document)] = required('What is asked, as a text or as `{"text": ...}`.')
    documents: Annotated[tuple[str, ...], ReadBy(_documents, _Documents)] | None = option(
        'At most 2,048 texts, or objects whose `text` is read: `{"text": ...}`. Either this or `texts` is required.'
    )
    texts: Annotated[tuple[str, ...], ReadBy(_documents, _Texts)] | None = option(
        "The documents in the request of text-embeddings-inference, whose answer is a list of `index` and `score`."
    )
    truncate: Flag | None = option("True is -1 for `truncate_prompt_tokens`.", unset="false, but true for `/v2/rerank`")
    top_n: Whole | None = option("Most documents in the answer; 0 is all.", unset="0", ge=0)
    return_documents: Flag | None = option(
        "Add the text of each document to the answer.", unset="true, but false for `/v2/rerank` and with `texts`"
    )
    raw_scores: Flag | None = option(
        "True gives the logits, false scores from 0 to 1.", unset="as `use_activation` says, else false with `texts`"
    )
    max_chunks_per_doc: object = option("Each document is one input. It is not split.", has_effect=False)
    return_embeddings: Annotated[object, Only((False,), "Use /v1/embeddings.")] | None = option(
        "Only false is accepted.", has_effect=False, kind="demand"
    )

    aliases: ClassVar[Mapping[str, str]] = {**ScoringFields.aliases, "return_text": "return_documents"}
    refused: ClassVar[Mapping[str, str]] = {
        "rank_fields": "Send each document as one text.",
        "relevant_spans": "Scores are of whole documents: send shorter ones.",
    }

    @property
    def wants_activation(self) -> bool | None:
        if self.texts is None and self.raw_scores is None:
            return self.use_activation
        return activation_by_tei(self.raw_scores, self.use_activation)

    @property
    def logits_option(self) -> tuple[str, str]:
        return ("raw_scores", "true") if self.texts is not None else super().logits_option

    @property
    def cut_option(self) -> tuple[str, str]:
        return ("truncate", "true") if self.texts is not None else super().cut_option


class ScoreRequest(ScoringFields):
    """Pairs of texts to score: one first text and some second ones, or as many of each."""

    text_1: OneOrMany = required("The first text of all pairs, or that of each. At most 2,048.")
    text_2: OneOrMany = required("The second text of each pair. At most 2,048.")

    aliases: ClassVar[Mapping[str, str]] = {
        **ScoringFields.aliases,
        "queries": "text_1", "data_1": "text_1", "documents": "text_2", "items": "text_2", "data_2": "text_2",
    }  # fmt: skip
