"""The request of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from inferd.engine.api.wire.params import MAX_LOGPROBS
from inferd.server.errors import messages as errors
from inferd.server.schema.generation import MAX_PROMPTS, OUTPUT, PROMPT, GenerationFields
from inferd.server.schema.request_model import option, required
from inferd.server.schema.token_ids import TokenId, check_array, is_whole, read_token_ids
from inferd.server.schema.values import Flag, ReadBy, Text, Whole

Prompt = str | tuple[int, ...]


_FORMS = "one of a string, an array of strings, an array of integers or an array of arrays of integers"
_TokenIds = Annotated[list[TokenId], Field(min_length=1)]


def read_prompts(value: object, where: str, min_chars: int = 0) -> tuple[Prompt, ...]:
    """A prompt or several, each as text or as token ids. Raises `RequestError`.

    The first item tells a list of texts from a list of ids. `min_chars`: of a text. An empty text is a prompt if the
    tokenizer begins every text with a token, so the intake checks that.
    """
    if isinstance(value, str):
        return (_text(value, where, min_chars),)
    if not isinstance(value, list):
        raise errors.invalid_type(where, _FORMS, value)
    first = value[0] if value else 0
    if is_whole(first):
        return (read_token_ids(value, where, min_length=1),)
    if not isinstance(first, str) and not (isinstance(first, list) and (not first or is_whole(first[0]))):
        raise errors.invalid_type(where, _FORMS, value)
    check_array(value, where, _FORMS, 1, MAX_PROMPTS)
    if isinstance(first, str):
        return tuple(_text(text, f"{where}[{i}]", min_chars) for i, text in enumerate(value))
    return tuple(read_token_ids(ids, f"{where}[{i}]", min_length=1) for i, ids in enumerate(value))


def _text(value: object, where: str, min_chars: int) -> str:
    if not isinstance(value, str):
        raise errors.invalid_type(where, "a string", value)
    if len(value) < min_chars:
        raise errors.empty_string(where)
    return value


def prompts(min_chars: int) -> ReadBy:
    """A prompt or several, as an annotation."""
    text = Annotated[Text, Field(min_length=min_chars)] if min_chars else Text
    many_texts = Annotated[list[text], Field(min_length=1, max_length=MAX_PROMPTS)]  # type: ignore[valid-type]
    many_ids = Annotated[list[_TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    sent = text | _TokenIds | many_texts | many_ids
    return ReadBy(lambda value, where: read_prompts(value, where, min_chars), sent)


class CompletionRequest(GenerationFields):
    """Texts and how to continue them."""

    prompt: Annotated[tuple[Prompt, ...], prompts(0)] = required(
        "A text, a list of texts, a list of token ids, or a list of such lists.", area=PROMPT
    )
    echo: Flag | None = option(
        "Begin the text with the prompt. With `logprobs`, the prompt's tokens are scored too.",
        unset="false",
        area=OUTPUT,
    )
    logprobs: Whole | None = option(
        "Add the log probabilities of the generated tokens, with this many alternatives.",
        unset="none",
        area=OUTPUT,
        ge=0,
        le=MAX_LOGPROBS,
    )
    suffix: Text | None = option(
        "Text behind the prompt: the answer is the text between the two. Only for models whose tokenizer has tokens "
        "for filling in the middle. Special tokens in either text are read as text. An empty suffix means none.",
        unset="none",
        area=PROMPT,
    )
    refused: ClassVar[Mapping[str, str]] = {
        **GenerationFields.refused,
        **dict.fromkeys(
            ("messages", "tools", "tool_choice", "reasoning_effort", "include_reasoning", "thinking_token_budget"),
            "Completions are one text; use /v1/chat/completions.",
        ),
    }
