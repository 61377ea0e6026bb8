"""Log probabilities in JSON: OpenAI's form for chat, its older form for text, and vLLM's form for prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar, cast

from inferd.engine.api.wire.messages import WireLogprobs
from inferd.server.endpoints.long_lists import LongList
from inferd.server.generate.events import ScoredToken
from inferd.server.schema.answers.generation import (
    ChatLogprobs,
    PromptLogprobs,
    RankedLogprob,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
)
from inferd.server.text.detokenizer import token_text
from inferd.server.text.token_bytes import TokenBytes

T = TypeVar("T")
R = TypeVar("R")

_LONG = 16
"""Number of tokens from which on a list is written in pieces. As objects, a token with 20 alternatives takes 9 KB."""
LEAST_LOGPROB = -9999.0
"""OpenAI's value for "very unlikely", because JSON has no infinity."""


def chat_logprobs(table: TokenBytes, scored: Collection[ScoredToken]) -> ChatLogprobs:
    return {"content": _list(scored, lambda token: _chat_token(table, token.logprobs)), "refusal": None}


def text_logprobs(
    table: TokenBytes, scored: Collection[ScoredToken | None], num_top: int, first_id: int | None = None
) -> TextLogprobs:
    """Four lists of one length. The entry None stands for the prompt's first token, `first_id`, which has no score."""

    def column(show: Callable[[ScoredToken], R], first: R) -> Sequence[R]:
        return _list(scored, lambda token: first if token is None else show(token))

    # Only the prompt's first token has no log probability, so an answer without a prompt does not need its text.
    first_text = "" if first_id is None else _legacy_text(table, first_id)
    return {
        "tokens": column(lambda token: _legacy_text(table, token.logprobs.token_id), first_text),
        "token_logprobs": column(lambda token: _finite(token.logprobs.logprob), None),
        "top_logprobs": column(lambda token: _top_texts(table, token.logprobs, num_top), None),
        "text_offset": column(lambda token: token.offset, 0),
    }


def prompt_logprobs(table: TokenBytes, scored: Collection[ScoredToken | None], num_top: int) -> PromptLogprobs:
    return _list(scored, lambda token: None if token is None else _ranked(table, token.logprobs, num_top))


def _list(items: Collection[T], show: Callable[[T], R]) -> Sequence[R]:
    """The list of `show(item)`, written in pieces if it is long. Only `long_lists` may read its entries."""
    return [show(item) for item in items] if len(items) < _LONG else cast("list[R]", LongList(items, show))


def _chat_token(table: TokenBytes, logprobs: WireLogprobs) -> TokenLogprob:
    top = [_entry(table, token_id, logprob) for token_id, logprob in logprobs.top]
    return {**_entry(table, logprobs.token_id, logprobs.logprob), "top_logprobs": top}


def _entry(table: TokenBytes, token_id: int, logprob: float) -> TopLogprob:
    return {"token": token_text(table, token_id), "logprob": _finite(logprob), "bytes": list(table.of(token_id))}


def _top_texts(table: TokenBytes, logprobs: WireLogprobs, num_top: int) -> dict[str, float]:
    top: dict[str, float] = {}
    # If two ids have one text, the likelier one keeps it. The chosen token is always in the list.
    for token_id, logprob in (*logprobs.top[:num_top], (logprobs.token_id, logprobs.logprob)):
        top.setdefault(_legacy_text(table, token_id), _finite(logprob))
    return top


def _legacy_text(table: TokenBytes, token_id: int) -> str:
    """The token's text. A token that is part of a character becomes "bytes:\\xe2\\x96", as in OpenAI's older API."""
    data = table.of(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _ranked(table: TokenBytes, logprobs: WireLogprobs, num_top: int) -> dict[str, RankedLogprob]:
    chosen = (logprobs.token_id, logprobs.logprob, logprobs.rank)
    ranks = [(token_id, logprob, i + 1) for i, (token_id, logprob) in enumerate(logprobs.top[:num_top])]
    return {
        str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(table, token_id)}
        for token_id, logprob, rank in (chosen, *ranks)
    }


def _finite(logprob: float) -> float:
    # NaN compares false, so it becomes the least value too.
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
