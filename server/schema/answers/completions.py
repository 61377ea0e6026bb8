"""The answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NotRequired

from inferd.server.errors.answer import Answer, TokenIds
from inferd.server.schema.answers.generation import (
    AnswerHead,
    ChunkTail,
    EndReason,
    Extra,
    PromptLogprobs,
    TextLogprobs,
    Usage,
)


class TextTokens(Answer, total=False):
    """Token ids of a choice. Absent unless `return_token_ids` is true."""

    token_ids: TokenIds
    prompt_token_ids: TokenIds
    """In a stream only in the first chunk of the choice."""


class TextChoice(TextTokens):
    index: int
    """Choices are numbered from 0, first those of the first prompt."""
    text: str
    """Text of the answer, after that of the prompt if `echo` is true."""
    logprobs: TextLogprobs | None
    finish_reason: EndReason
    stop_reason: str | int | None
    """Stop string or stop token id that ended the choice. Null if the model or a limit did."""
    prompt_logprobs: NotRequired[PromptLogprobs]
    """Only if the request asks for them."""


class TextHead(AnswerHead):
    """Fields that an answer shares with all of its chunks."""

    id: str
    object: Literal["text_completion"]


class Completion(TextHead, Extra):
    """Texts that continue the prompts."""

    choices: Sequence[TextChoice]
    usage: Usage


class TextChunkChoice(TextTokens):
    index: int
    text: str
    """New text."""
    logprobs: TextLogprobs | None
    finish_reason: EndReason | None
    """Null in each chunk of the choice but the last."""
    stop_reason: NotRequired[str | int | None]
    """Only in the last chunk of the choice."""


class CompletionChunk(TextHead, ChunkTail):
    """One event of a streamed answer."""

    choices: Sequence[TextChunkChoice]
    """One choice. Empty in the last chunk, which has the usage."""
