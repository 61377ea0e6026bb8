"""The wire types of /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferd.server.schema.chat import MAX_DOCUMENTS, Tool
from inferd.server.schema.fields import RequestFields, wire
from inferd.server.schema.kinds import Array, Boolean, Json, Text, TokenIds
from inferd.server.schema.messages import Message, Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest(RequestFields):
    """Either `prompt` or `messages`."""

    model: str | None = wire(Text(), "The name of the served model.", unset="the served model")
    prompt: str | None = wire(
        Text(), "A text of at most 1,048,576 tokens, or of the context if that is more. Give either this or `messages`."
    )
    messages: tuple[Message, ...] | None = wire(Messages(), "A conversation to be rendered and tokenized.")
    tools: tuple[Mapping[str, object], ...] | None = wire(Array(Tool(), max_length=128), "As in chat.", unset="none")
    documents: tuple[Mapping[str, object], ...] | None = wire(
        Array(Json(), max_length=MAX_DOCUMENTS), "As in chat.", unset="none"
    )
    add_special_tokens: bool | None = wire(
        Boolean(),
        "Begin the text as the tokenizer begins every text.",
        unset="true for a prompt, false for messages",
    )
    add_generation_prompt: bool | None = wire(Boolean(), "As in chat.", unset="true")
    continue_final_message: bool | None = wire(Boolean(), "As in chat.", unset="false")
    chat_template_kwargs: Mapping[str, object] | None = wire(Json(), "As in chat.", unset="none")
    return_token_strs: bool | None = wire(
        Boolean(), "Add `token_strs`: each token as the vocabulary writes it.", unset="false"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest(RequestFields):
    """Token ids to be read as one text."""

    model: str | None = wire(Text(), "The name of the served model.", unset="the served model")
    tokens: tuple[int, ...] = wire(TokenIds(), "Token ids of one text of at most 16 MiB.", required=True)
