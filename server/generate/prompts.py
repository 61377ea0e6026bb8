"""Prompts: text, conversations and ids -> token ids that fit the model.

Renders and encodes on threads. Knows nothing of sampling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from inferd.engine.api.errors import RequestError
from inferd.server import errors
from inferd.server.generate.request import Prompt
from inferd.server.pieces import pieces
from inferd.server.schema import completions
from inferd.server.text.detokenizer import Detokenizer
from inferd.server.text.lanes import Lanes
from inferd.server.text.limited import Limited, OvertimeError
from inferd.server.text.model import ServedModel
from inferd.server.text.template import Conversation
from inferd.server.text.token_bytes import TokenBytes
from inferd.server.text.tokenizer import TooManyTokensError

RENDER_LIMIT_S = 10.0
"""A hundred times what 10,000 messages take (0.1 s; one core, AMD EPYC Zen 4, 2026-11-21)."""

MANY_IDS = 2**20
"""To list so many ids holds the interpreter lock for 25 ms (2 cores, AMD EPYC Zen 4, 2026-11-21): of a text that is
longer, and than the context, no part is kept, also where the caller says to."""

T = TypeVar("T")

Encoded = tuple[tuple[int, ...], str | None]
"""(ids, text as the caller wrote it, where the caller did)."""


CheckSize = Callable[[int, int], None]
"""Told a text's bytes, and how many tokens they are at the least; raises `RequestError` where that is too much."""


def any_size(num_bytes: int, least_tokens: int) -> None:
    """Nothing is too long."""


class Prompts:
    """Reads prompts for one model."""

    def __init__(self, model: ServedModel, lanes: Lanes, render_limit_s: float = RENDER_LIMIT_S) -> None:
        self._model, self._lanes, self._render_limit_s = model, lanes, render_limit_s

    async def run(self, work: Callable[[], T], size: int) -> T:
        """`work()` on a thread of those that prompts are read on. Raises what `work` raises."""
        return await self._lanes.run(work, size)

    async def render(
        self, conversation: Conversation, *, add_special: bool, check_size: CheckSize = any_size
    ) -> Encoded:
        """A conversation as the model reads it. Raises `RequestError` where it has no template, or that refuses."""
        template, tokenizer = self._model.template, self._model.tokenizer
        if template is None:
            message = "This model has no chat template; use /v1/completions instead."
            raise RequestError("unsupported_value", message, "messages")

        rendered = Limited(lambda: template.render(conversation), self._render_limit_s)

        def work() -> Encoded:
            try:
                text = rendered()
            except OvertimeError as error:
                message = (
                    f"The model's chat template did not render these messages: {error}. Send fewer, or shorter ones."
                )
                raise RequestError("invalid_value", message, "messages") from error
            check_size(*tokenizer.size_of(text))
            return self._encode(text, add_special, "messages"), text

        return await self._lanes.run(work, _num_chars(conversation.messages))

    async def encode(self, text: str, *, add_special: bool) -> tuple[int, ...]:
        """The ids of a text."""
        return await self._lanes.run(lambda: self._encode(text, add_special, "prompt"), len(text))

    async def encode_all(
        self,
        prompts: Sequence[completions.Prompt],
        *,
        add_special: bool,
        param: str = "prompt",
        check_size: CheckSize = any_size,
    ) -> list[Encoded]:
        """Texts encoded, ids checked, in order. Raises `RequestError` for an id that is no row of the embedding."""
        tokenizer = self._model.tokenizer

        def encode(i: int, prompt: completions.Prompt) -> Encoded:
            if isinstance(prompt, str):
                check_size(*tokenizer.size_of(prompt))
                return self._encode(prompt, add_special, param), prompt
            self.check_ids(prompt, f"{param}[{i}]" if len(prompts) > 1 else param)
            return prompt, None

        def work() -> list[Encoded]:
            return [encode(i, prompt) for i, prompt in enumerate(prompts)]

        return await self._lanes.run(work, sum(map(len, prompts)))

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written at a text's start and after a space: to a caller, both are the word."""
        if not words:
            return ()
        encode = self._model.tokenizer.encode

        def work() -> tuple[tuple[int, ...], ...]:
            spelt = (encode(spelling, False) for word in words for spelling in (word, " " + word.lstrip()))
            return tuple(dict.fromkeys(token_ids for token_ids in spelt if token_ids))

        return await self._lanes.run(work, sum(map(len, words)))

    async def read_back(self, prompts: tuple[Prompt, ...], skip_special: bool) -> tuple[Prompt, ...]:
        """The prompts with what an answer may show of them: their text, and the place of each id in it."""
        table = self._model.tokenizer.bytes

        def work() -> tuple[Prompt, ...]:
            return tuple(_read_back(prompt, table, skip_special) for prompt in prompts)

        return await self._lanes.run(work, sum(len(prompt.token_ids) for prompt in prompts))

    def _encode(self, text: str, add_special: bool, param: str) -> tuple[int, ...]:
        """Raises `RequestError` for a text of more tokens than the context holds, and than `MANY_IDS`."""
        try:
            return self._model.tokenizer.encode(text, add_special, max(MANY_IDS, self._model.max_model_len))
        except TooManyTokensError as error:
            raise errors.context_too_long(param, self._model.max_model_len, error.num_tokens, None) from None

    def check_ids(self, token_ids: Sequence[int], where: str) -> None:
        """Raises `RequestError` for the first id that is no row of the embedding."""
        high = self._model.vocab_size - 1
        if any(min(piece) < 0 or max(piece) > high for piece in pieces(token_ids)):
            i, wrong = next((i, token_id) for i, token_id in enumerate(token_ids) if not 0 <= token_id <= high)
            place = f"{where}[{i}]"
            raise errors.below_min(place, 0, wrong) if wrong < 0 else errors.above_max(place, high, wrong)

    def check_least(self, param: str, num_bytes: int, least_tokens: int) -> None:
        """Raises `RequestError` for a text that cannot fit, whatever its tokens are."""
        limit = self._model.max_model_len
        if least_tokens > limit:
            raise errors.text_too_long(param, limit, num_bytes, least_tokens)

    def fit(self, param: str, encoded: Encoded, asked: int | None, default: int | None, truncate: int | None) -> Prompt:
        """A prompt with its `max_tokens`, within the context. Raises `RequestError`.

        `asked` tokens must fit whole; of `default` (None: all there is room for) as many as fit are allowed. `truncate`
        keeps the last so many tokens (-1: as many as leave room for the answer), because the caller said so.
        """
        limit = self._model.max_model_len
        token_ids, text = encoded
        kept = truncate
        if truncate == -1:
            kept = max(1, limit - (asked if asked is not None else default or 1))
        if kept is not None and len(token_ids) > kept:
            token_ids, text = token_ids[-kept:], None
        if not token_ids:
            raise RequestError("invalid_value", f"Invalid '{param}': it has no tokens. Expected at least one.", param)
        room = limit - len(token_ids)
        if asked is None and room >= 1:
            return Prompt(token_ids, min(room, default or room), text)
        if asked is not None and room >= asked:
            return Prompt(token_ids, asked, text)
        raise errors.context_too_long(param, limit, len(token_ids), asked or None)


def _read_back(prompt: Prompt, table: TokenBytes, skip_special: bool) -> Prompt:
    """A text that the caller wrote stays as it was written."""
    detokenizer = Detokenizer(table, (), skip_special)
    pieces = [detokenizer.feed(token_id) for token_id in prompt.token_ids]
    offsets = tuple(itertools.accumulate(map(len, pieces[:-1]), initial=0))
    return replace(prompt, text="".join(pieces) if prompt.text is None else prompt.text, offsets=offsets)


def _num_chars(messages: Sequence[object]) -> int:
    """Rough size of a conversation: what is long in it are strings."""
    fields = (message.values() for message in messages if isinstance(message, dict))
    return sum(len(value) for values in fields for value in values if isinstance(value, str))
