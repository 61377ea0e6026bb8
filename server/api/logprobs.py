"""Log probabilities on the wire: OpenAI's chat form, its older text form, and vLLM's form for prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import orjson

from inferd.engine.api.messages import WireLogprobs
from inferd.server.generate.events import ScoredToken
from inferd.server.text.detokenizer import token_text
from inferd.server.text.token_bytes import TokenBytes

T = TypeVar("T")

_ENCODED_AT_ONCE = 1024
"""Tokens."""
LEAST_LOGPROB = -9999.0
"""What OpenAI writes for "very unlikely": JSON has no infinity."""


def chat_logprobs(table: TokenBytes, scored: Iterable[ScoredToken]) -> dict[str, Any]:
    return {"content": _list(scored, lambda token: _chat_token(table, token.logprobs)), "refusal": None}


def text_logprobs(
    table: TokenBytes, scored: Iterable[ScoredToken | None], num_top: int, first_id: int | None = None
) -> dict[str, Any]:
    """Four lists of one length. An entry None is the prompt's first token, `first_id`: it follows nothing."""

    def show(token: ScoredToken | None) -> tuple[Any, ...]:
        return _first_token(table, first_id) if token is None else _text_token(table, token, num_top)

    return dict(zip(("tokens", "token_logprobs", "top_logprobs", "text_offset"), _lists(scored, show, 4), strict=True))


def prompt_logprobs(
    table: TokenBytes, scored: Iterable[ScoredToken | None], num_top: int
) -> list[dict[str, Any] | None] | orjson.Fragment:
    """For each prompt token, token id -> how it was ranked."""
    return _list(scored, lambda token: None if token is None else _ranked(table, token.logprobs, num_top))


def _list(items: Iterable[T], show: Callable[[T], Any]) -> list[Any] | orjson.Fragment:
    """What JSON shows of each."""
    (shown,) = _lists(items, lambda item: (show(item),), 1)
    return shown


def _lists(
    items: Iterable[T], show: Callable[[T], tuple[Any, ...]], num_lists: int
) -> list[list[Any] | orjson.Fragment]:
    """`show` gives one entry of each list. Long lists are encoded piece by piece, each forgotten before the next.

    No other thread runs while orjson encodes, nor while objects are looked through for cycles: of a million entries the
    one took 0.12 s, the other as long (one core of an AMD EPYC Zen 4, 2026-11-21). And an entry takes 400 bytes as
    objects, 60 as JSON.
    """
    left = iter(items)
    columns = _columns(left, show, num_lists)
    if len(columns[0]) < _ENCODED_AT_ONCE:
        return list(columns)
    encoded: list[list[bytes]] = [[] for _ in range(num_lists)]
    while columns[0]:
        for pieces, column in zip(encoded, columns, strict=True):
            pieces += (b",", orjson.dumps(column)[1:-1])
        columns = _columns(left, show, num_lists)
    # One copy: of what takes tens of megabytes, each holds the interpreter lock for tens of milliseconds.
    return [orjson.Fragment(b"".join((b"[", *pieces[1:], b"]"))) for pieces in encoded]


def _columns(left: Iterator[T], show: Callable[[T], tuple[Any, ...]], num_lists: int) -> list[list[Any]]:
    rows = [show(item) for item in islice(left, _ENCODED_AT_ONCE)]
    return [[row[i] for row in rows] for i in range(num_lists)]


def _chat_token(table: TokenBytes, logprobs: WireLogprobs) -> dict[str, Any]:
    top = [_entry(table, token_id, logprob) for token_id, logprob in logprobs.top]
    return {**_entry(table, logprobs.token_id, logprobs.logprob), "top_logprobs": top}


def _entry(table: TokenBytes, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": token_text(table, token_id), "logprob": _finite(logprob), "bytes": list(table.of(token_id))}


def _first_token(table: TokenBytes, first_id: int | None) -> tuple[str, None, None, int]:
    assert first_id is not None, "only a prompt begins without log probabilities"
    return _legacy_text(table, first_id), None, None, 0


def _text_token(table: TokenBytes, token: ScoredToken, num_top: int) -> tuple[str, float, dict[str, float], int]:
    logprobs = token.logprobs
    top: dict[str, float] = {}
    # Two ids may have one text: the likelier keeps it. The chosen token is always among them.
    for token_id, logprob in (*logprobs.top[:num_top], (logprobs.token_id, logprobs.logprob)):
        top.setdefault(_legacy_text(table, token_id), _finite(logprob))
    return _legacy_text(table, logprobs.token_id), _finite(logprobs.logprob), top, token.offset


def _legacy_text(table: TokenBytes, token_id: int) -> str:
    """A token that is no text of its own as OpenAI's older API writes it: "bytes:\\xe2\\x96"."""
    data = table.of(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _ranked(table: TokenBytes, logprobs: WireLogprobs, num_top: int) -> dict[str, Any]:
    chosen = (logprobs.token_id, logprobs.logprob, logprobs.rank)
    ranks = [(token_id, logprob, i + 1) for i, (token_id, logprob) in enumerate(logprobs.top[:num_top])]
    return {
        str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(table, token_id)}
        for token_id, logprob, rank in (chosen, *ranks)
    }


def _finite(logprob: float) -> float:
    # Written so that NaN, which compares false, is never let through.
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
