"""The wire types of /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferd.server.schema.chat import Tool
from inferd.server.schema.fields import RequestFields, wire
from inferd.server.schema.kinds import Array, Boolean, Json, Text, TokenIds
from inferd.server.schema.messages import Message, Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest(RequestFields):
    """Either `prompt` or `messages`."""

    model: str | None = wire(Text())
    prompt: str | None = wire(Text())
    messages: tuple[Message, ...] | None = wire(Messages())
    tools: tuple[Mapping[str, object], ...] | None = wire(Array(Tool(), max_length=128))
    add_special_tokens: bool | None = wire(Boolean())
    add_generation_prompt: bool | None = wire(Boolean())
    continue_final_message: bool | None = wire(Boolean())
    chat_template_kwargs: Mapping[str, object] | None = wire(Json())
    return_token_strs: bool | None = wire(Boolean())


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest(RequestFields):
    """Token ids to be read as one text."""

    model: str | None = wire(Text())
    tokens: tuple[int, ...] = wire(TokenIds(), required=True)
