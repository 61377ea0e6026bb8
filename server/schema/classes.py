"""The requests for classes of texts: /v1/classify of vLLM, and /predict of text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from inferd.server.errors import messages as errors
from inferd.server.schema.completions import Prompt, prompts
from inferd.server.schema.generation import MAX_PROMPTS
from inferd.server.schema.request_model import option, required
from inferd.server.schema.scores import JudgingFields, activation_by_tei
from inferd.server.schema.token_ids import check_array
from inferd.server.schema.values import Flag, ReadBy, Text

_FORMS = "one of a string, an array of two strings, or an array of arrays of one string or two"
_OneOrTwo = Annotated[list[Text], Field(min_length=1, max_length=2)]
_Batch = Annotated[list[_OneOrTwo], Field(min_length=1, max_length=MAX_PROMPTS)]

Texts = tuple[str, ...]
"""One text, or the two of a pair."""


class ClassifyRequest(JudgingFields):
    """Texts to classify."""

    input: Annotated[tuple[Prompt, ...], prompts(0)] = required(
        "A text, a list of texts, a list of token ids, or a list of such lists; at most 1,048,576 tokens in all."
    )
    add_special_tokens: Flag | None = option(
        "Add the special tokens that the tokenizer adds to every text.", unset="true"
    )

    aliases: ClassVar[Mapping[str, str]] = {**JudgingFields.aliases, "softmax": "use_activation"}
    refused: ClassVar[Mapping[str, str]] = {
        "messages": "Send the token ids that /v1/chat/completions/render gives as 'input'."
    }


def _inputs(value: Any, where: str) -> tuple[tuple[Texts, ...], bool]:
    """(the texts or pairs, whether they are a batch). A list of two strings is one pair."""
    if isinstance(value, str):
        return ((value,),), False
    check_array(value, where, _FORMS, 1, MAX_PROMPTS)
    if isinstance(value[0], str):
        return (_one(value, where, 2),), False
    return tuple(_one(item, f"{where}[{i}]", 1) for i, item in enumerate(value)), True


def _one(value: Any, where: str, least: int) -> Texts:
    check_array(value, where, _FORMS, least, 2)
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise errors.invalid_type(f"{where}[{i}]", "a string", text)
    return tuple(value)


class PredictRequest(JudgingFields):
    """Texts and pairs to classify."""

    inputs: Annotated[tuple[tuple[Texts, ...], bool], ReadBy(_inputs, Text | _OneOrTwo | _Batch)] = required(
        "A text, a pair as a list of two texts, or a list of lists of one text or two. At most 2,048."
    )
    raw_scores: Flag | None = option(
        "True gives the logits, false probabilities.", unset="as `use_activation` says, else false"
    )

    @property
    def wants_activation(self) -> bool | None:
        return activation_by_tei(self.raw_scores, self.use_activation)

    @property
    def logits_option(self) -> tuple[str, str]:
        return "raw_scores", "true"

    @property
    def cut_option(self) -> tuple[str, str]:
        return "truncate", "true"
