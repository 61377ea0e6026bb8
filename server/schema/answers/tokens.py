"""The answers of the routes about token ids."""

from __future__ import annotations

from collections.abc import Sequence

from inferd.server.errors.answer import Answer, TokenIds


class RenderedPrompt(Answer):
    """The prompt that the model would read."""

    token_ids: TokenIds


class Tokenized(Answer):
    """The token ids of a text or a conversation."""

    count: int
    """Number of token ids."""
    max_model_len: int
    """Number of tokens of the context."""
    tokens: TokenIds
    token_strs: Sequence[str | None] | None
    """Tokens as the vocabulary writes them. Null unless `return_token_strs` is true."""


class Detokenized(Answer):
    prompt: str
    """Text of the token ids, special tokens included."""


class TokenCount(Answer):
    input_tokens: int
    """Number of tokens that `/v1/messages` would read."""
