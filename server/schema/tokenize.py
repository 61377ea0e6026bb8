"""The requests of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from inferd.server.schema.chat import MAX_DOCUMENTS, Tools
from inferd.server.schema.chat_messages import Messages
from inferd.server.schema.request_model import RequestModel, option, required
from inferd.server.schema.token_ids import TokenId, read_token_ids
from inferd.server.schema.values import Flag, JsonObject, Many, ReadBy, Text


class TokenizeRequest(RequestModel):
    """A text or a conversation: either `prompt` or `messages`."""

    model: Text | None = option("The name of the served model.", unset="the served model")
    prompt: Text | None = option(
        "A text of at most 1,048,576 tokens, or of the context if that is more. Give either this or `messages`."
    )
    messages: Messages | None = option("A conversation to render and tokenize.")
    tools: Tools | None = option("As in chat.", unset="none")
    documents: Annotated[tuple[JsonObject, ...], Many(max_length=MAX_DOCUMENTS)] | None = option(
        "As in chat.", unset="none"
    )
    add_special_tokens: Flag | None = option(
        "Begin the text as the tokenizer begins every text.", unset="true for a prompt, false for messages"
    )
    add_generation_prompt: Flag | None = option("As in chat.", unset="true")
    continue_final_message: Flag | None = option("As in chat.", unset="false")
    chat_template_kwargs: JsonObject | None = option("As in chat.", unset="none")
    return_token_strs: Flag | None = option("Add `token_strs`: each token as the vocabulary writes it.", unset="false")


class DetokenizeRequest(RequestModel):
    """Token ids of one text."""

    model: Text | None = option("The name of the served model.", unset="the served model")
    tokens: Annotated[tuple[int, ...], ReadBy(read_token_ids, list[TokenId])] = required(
        "Token ids of one text of at most 16 MiB."
    )
