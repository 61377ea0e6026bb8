"""Prompts: texts, conversations and ids -> token ids that fit the model.

Has chats rendered, and tokenizes on threads. Knows nothing of sampling.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Generic, TypeVar

from inferd.engine.api.errors import RequestError
from inferd.server.errors import messages as errors
from inferd.server.generate.request import Prompt
from inferd.server.schema import completions
from inferd.server.schema.embeddings import Side
from inferd.server.schema.notices import Notice
from inferd.server.schema.token_ids import pieces
from inferd.server.text.control_tokens import Rendered
from inferd.server.text.detokenizer import Detokenizer
from inferd.server.text.model import ServedModel
from inferd.server.text.render_wire import Limits
from inferd.server.text.render_workers import OvertimeError, RarelyLogged, RenderError
from inferd.server.text.split_points import PART
from inferd.server.text.template import QUICK, SLOW, Conversation
from inferd.server.text.text_threads import LONG_TEXT, TextThreads
from inferd.server.text.tokenizer import NoSplitPointError, Tokenizer, TooManyTokensError

logger = logging.getLogger("inferd.server")

T = TypeVar("T")

_NUM_RENDERS = 2
"""Renderings that run at once, of quick ones and of slow ones."""

_MAX_SLOW = 64
"""Most slow renderings that may wait or run."""

MANY_IDS = 2**20
"""Most ids of a text, unless the context holds more: as Python's numbers they take 40 MiB."""

Encoded = tuple[tuple[int, ...], str | None]
"""(ids, the caller's text; None if the caller sent ids)."""


_AS_TEXT = (
    "control tokens in the messages, tools or documents are text to the model; a server with --trust-special-tokens "
    "reads them as control tokens"
)

CheckSize = Callable[[int, int], None]
"""Called with a text's bytes and a lower bound of its tokens; raises `RequestError` if that is too much."""


@dataclass(frozen=True, slots=True)
class _Result(Generic[T]):
    """The value that a generator returned after the sizes that it yielded."""

    value: T


class PromptReader:
    """Reads prompts for one model."""

    def __init__(self, model: ServedModel, threads: TextThreads, render_cpu_s: float = SLOW.cpu_s) -> None:
        """`render_cpu_s`: most processor time for the template of one conversation."""
        self._model, self._threads, self._render_cpu_s = model, threads, render_cpu_s
        self._renders = TextThreads(num_short=_NUM_RENDERS, num_long=_NUM_RENDERS, name="render")
        self._num_slow = 0
        self._unrendered, self._failed = RarelyLogged(), RarelyLogged()

    def close(self) -> None:
        """End its threads. Renderings that run are given up."""
        self._renders.close()  # first, so that no other rendering begins
        if self._model.template is not None:
            self._model.template.close()

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Run `work()` on a thread of the pools that prompts are read on. Raises what `work` raises."""
        return await self._threads.run(work, size)

    async def render(
        self,
        conversation: Conversation,
        *,
        add_special: bool,
        check_size: CheckSize | None = None,
        kept: int | None = None,
        notices: list[Notice] | None = None,
    ) -> Encoded:
        """A conversation as the model reads it. Raises `RequestError` if the model has no template or it refuses.

        `notices` gets what was changed for the template. `check_size` (None: the prompt need not fit the context) and
        `kept` as for `encode_all`.
        """
        template, tokenizer = self._model.template, self._model.tokenizer
        if template is None:
            message = "This model has no chat template; use /v1/completions instead."
            raise RequestError("unsupported_value", message, "messages")
        size = _num_chars(conversation.messages)
        rendered = await self._rendered(partial(template.read, conversation, notices=notices), size)

        def work() -> Generator[int, None, Encoded]:
            text, own = rendered.text, tokenizer
            if check_size is not None:
                check_size(*tokenizer.size_of(text))
            control_tokens = template.control_tokens
            named, is_forged = (None, False) if control_tokens is None else control_tokens.named(rendered)
            if control_tokens is not None and named is not None:
                text, own = named, control_tokens.tokenizer
            if notices is not None and is_forged:
                notices.append(Notice("control_tokens", _AS_TEXT))
            if notices is not None and add_special and own.has_own_bos(text):
                notices.append(self._second_bos())
            ids = yield from self._encode(text, add_special, "messages", kept, must_fit=check_size is not None, own=own)
            return ids, rendered.text

        return await self.in_turns(work(), size)

    async def _rendered(self, render: Callable[[Limits], Rendered], size: int) -> Rendered:
        """The rendered conversation. Raises `RequestError`.

        Quick renderings do not wait behind slow ones. One that takes too long for a quick one begins again as a slow
        one, as long texts begin.
        """
        try:
            if size < LONG_TEXT:
                with contextlib.suppress(OvertimeError):
                    return await self._renders.run(partial(render, QUICK), 0)
            return await self._rendered_slowly(render, is_nice=size < LONG_TEXT)
        except OvertimeError as error:
            name = self._model.names[0]
            self._unrendered.warn("%s: the chat template did not render a request's messages: %s", name, error)
            message = f"The model's chat template did not render these messages: {error}. Send fewer, or shorter ones."
            raise RequestError("invalid_value", message, "messages") from error
        except RenderError as error:
            raise self._failure(error) from error

    def _failure(self, error: RenderError) -> RequestError:
        """The refusal of a request whose messages the server could not render, which is no fault of theirs."""
        self._failed.warn("%s: cannot render a request's messages: %s", self._model.names[0], error)
        message = f"The server could not have the model's chat template rendered: {error}. Please retry later."
        return RequestError("server_is_overloaded", message)

    async def _rendered_slowly(self, render: Callable[[Limits], Rendered], *, is_nice: bool) -> Rendered:
        if self._num_slow >= _MAX_SLOW:
            message = f"{self._num_slow} prompts wait for the model's chat template, the most that may; retry later."
            raise RequestError("server_is_overloaded", message)
        limits = Limits(self._render_cpu_s, is_nice=is_nice)
        self._num_slow += 1
        try:
            return await self._renders.run(partial(render, limits), LONG_TEXT)
        finally:
            self._num_slow -= 1

    async def encode(self, text: str, *, add_special: bool) -> tuple[int, ...]:
        """The ids of a text. They need not fit the context."""
        return await self.in_turns(self._encode(text, add_special, "prompt", None, must_fit=False), 0)

    async def encode_all(
        self,
        prompts: Sequence[completions.Prompt],
        *,
        add_special: bool,
        param: str = "prompt",
        check_size: CheckSize | None = None,
        kept: int | None = None,
        side: Side | None = None,
        check_total: Callable[[int, int], None] | None = None,
    ) -> list[Encoded]:
        """Tokenize texts and check ids, in order. Raises `RequestError` for an id that is no row of the embedding.

        `kept`: only so many of a prompt's last ids are needed; one more is returned if there are more. With a `side`
        that side of each text is cut instead, and `cut` takes the rest. `check_total` is called after each prompt with
        how many prompts were read, and how many ids they have together.
        """
        tokenizer = self._model.tokenizer

        def work() -> Generator[int, None, list[Encoded]]:
            encoded: list[Encoded] = []
            num_read = num_ids = 0
            for i, prompt in enumerate(prompts):
                num_read += len(prompt)
                if num_read > PART:
                    yield len(prompt)
                    num_read = 0
                if isinstance(prompt, str):
                    if check_size is not None:
                        check_size(*tokenizer.size_of(prompt))
                    ids = yield from self._encode(prompt, add_special, param, kept, must_fit=True, side=side)
                    encoded.append((ids, prompt))
                else:
                    self.check_ids(prompt, f"{param}[{i}]" if len(prompts) > 1 else param)
                    encoded.append((prompt, None))
                num_ids += len(encoded[-1][0])
                if check_total is not None:
                    check_total(i + 1, num_ids)
            return encoded

        return await self.in_turns(work(), max(map(len, prompts), default=0))

    def second_bos(self, prompts: Iterable[object], *, add_special: bool) -> tuple[Notice, ...]:
        """Tells the caller if a text begins with the BOS that would have been added to it. `prompts`: texts; anything
        else is passed over."""
        tokenizer = self._model.tokenizer
        if not add_special or not any(isinstance(text, str) and tokenizer.has_own_bos(text) for text in prompts):
            return ()
        return (self._second_bos(),)

    def _second_bos(self) -> Notice:
        bos = errors.shown(self._model.tokenizer.added_text)
        return Notice(
            "second_bos", f"the prompt begins with {bos}, which begins every prompt; it was not added a second time"
        )

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's ids, both as it begins a text and as it follows a space."""
        if not words:
            return ()
        encode = self._model.tokenizer.encode

        def work() -> tuple[tuple[int, ...], ...]:
            spelt = (encode(spelling, False) for word in words for spelling in (word, " " + word.lstrip()))
            return tuple(dict.fromkeys(token_ids for token_ids in spelt if token_ids))

        return await self._threads.run(work, sum(map(len, words)))

    async def read_back(self, prompts: tuple[Prompt, ...], skip_special: bool) -> tuple[Prompt, ...]:
        """The prompts with the text and the offset of each id, which an answer may show."""
        tokenizer = self._model.tokenizer

        def work() -> tuple[Prompt, ...]:
            return tuple(_read_back(prompt, tokenizer, skip_special) for prompt in prompts)

        return await self._threads.run(work, sum(len(prompt.token_ids) for prompt in prompts))

    async def in_turns(self, work: Generator[int, None, T], size: int) -> T:
        """Run `work` on threads, step by step. Between two steps other requests take their turn, and work ends if the
        caller has left. `work` yields the size of its next step; `size` is that of the first."""

        def step() -> int | _Result[T]:
            try:
                return next(work)
            except StopIteration as end:
                return _Result(end.value)

        while True:
            done = await self._threads.run(step, LONG_TEXT if size > 4 * PART else size)
            if isinstance(done, _Result):
                return done.value
            size = done

    def _encode(
        self,
        text: str,
        add_special: bool,
        param: str,
        kept: int | None,
        *,
        must_fit: bool,
        own: Tokenizer | None = None,
        side: Side | None = None,
    ) -> Generator[int, None, tuple[int, ...]]:
        """A text that begins with the BOS gets no second one. `own`: the tokenizer, if it is not the model's. Raises
        `RequestError` for a text with more tokens than both the context and `MANY_IDS`, and for one that cannot be
        tokenized in parts."""
        tokenizer = own or self._model.tokenizer
        add_special = add_special and not tokenizer.has_own_bos(text)
        last = None if kept is None else min(kept, self.most_tokens) + 1
        reading = tokenizer.encode_in_parts(text, add_special, self.most_tokens, last, side)
        return (yield from self.bounded(reading, param, must_fit=must_fit))

    @property
    def most_tokens(self) -> int:
        """Most tokens of a text."""
        return max(MANY_IDS, self._model.max_model_len)

    def part(self, text: str, param: str, *, add_special: bool = False) -> Generator[int, None, tuple[int, ...]]:
        """The ids of a text that is a part of an input, for `in_turns`."""
        reading = self._model.tokenizer.encode_in_parts(text, add_special, self.most_tokens)
        return self.bounded(reading, param)

    def bounded(
        self, reading: Generator[int, None, T], param: str, *, must_fit: bool = True
    ) -> Generator[int, None, T]:
        """`reading`, which tokenizes. Raises `RequestError` for the errors of the tokenizer."""
        try:
            return (yield from reading)
        except TooManyTokensError as error:
            if must_fit:
                raise errors.context_too_long(param, self._model.max_model_len, error.num_tokens, None) from None
            raise errors.too_many_tokens(param, self.most_tokens) from None
        except NoSplitPointError as error:
            raise errors.no_place_to_cut(param, error.start, error.num_chars, error.limit) from None

    def cut(self, token_ids: tuple[int, ...], kept: int | None, side: Side) -> tuple[int, ...]:
        """At most `kept` ids of a text, which stays whole within the tokens that the tokenizer adds, but for `side`."""
        return self._model.tokenizer.cut(token_ids, kept, side)

    def check_ids(self, token_ids: Sequence[int], where: str) -> None:
        """Raises `RequestError` for the first id that is no row of the embedding."""
        high = self._model.vocab_size - 1
        if any(min(piece) < 0 or max(piece) > high for piece in pieces(token_ids)):
            i, wrong = next((i, token_id) for i, token_id in enumerate(token_ids) if not 0 <= token_id <= high)
            place = f"{where}[{i}]"
            raise errors.below_min(place, 0, wrong) if wrong < 0 else errors.above_max(place, high, wrong)

    def check_least(self, param: str, num_bytes: int, least_tokens: int) -> None:
        """Raises `RequestError` for a text that cannot fit, judged by a lower bound of its tokens."""
        limit = self._model.max_model_len
        if least_tokens > limit:
            raise errors.text_too_long(param, limit, num_bytes, least_tokens)

    def kept(self, truncate: int | None, max_tokens: int | None, default: int | None) -> int | None:
        """How many of a prompt's last ids the caller wants to keep; None: all. `truncate` -1: as many as leave space
        for the answer. `max_tokens`, `default`: as for `fit`.

        An answer as long as the context has no bound of its own, so no space is kept for it but that of one token.
        """
        if truncate != -1:
            return truncate
        limit = self._model.max_model_len
        num_answer = max_tokens if max_tokens is not None else default or 1
        return max(1, limit - (num_answer if num_answer < limit else 1))

    def fit(
        self, param: str, encoded: Encoded, max_tokens: int | None, default: int | None, kept: int | None
    ) -> Prompt:
        """A prompt with the number of tokens that may follow it. Raises `RequestError` for a prompt that is empty or
        leaves no place for an answer.

        `max_tokens`: the caller's. `default`: used if the caller names none; None: no bound. Both are cut to what the
        context holds behind the prompt. `kept`: the result of `kept`.
        """
        limit = self._model.max_model_len
        token_ids, text = encoded
        if kept is not None and len(token_ids) > kept:
            if kept > limit:
                raise errors.above_max("truncate_prompt_tokens", limit, kept)
            token_ids, text = token_ids[-kept:], None
        if not token_ids:
            raise RequestError("invalid_value", f"Invalid '{param}': it has no tokens. Expected at least one.", param)
        num_free = limit - len(token_ids)
        least = 0 if max_tokens == 0 else 1
        if num_free < least:
            raise errors.context_too_long(param, limit, len(token_ids), least if num_free >= 0 else None)
        if max_tokens is None:
            max_tokens = default or num_free
        return Prompt(token_ids, min(num_free, max_tokens), text)


def _read_back(prompt: Prompt, tokenizer: Tokenizer, skip_special: bool) -> Prompt:
    """The caller's own text stays as it was written."""
    if prompt.text is not None:
        return replace(prompt, offsets=tokenizer.offsets(prompt.text, prompt.token_ids))
    detokenizer = Detokenizer(tokenizer.bytes, (), skip_special)
    pieces = [detokenizer.feed(token_id) for token_id in prompt.token_ids]
    return replace(prompt, text="".join(pieces), offsets=tuple(accumulate(map(len, pieces[:-1]), initial=0)))


def _num_chars(messages: Sequence[object]) -> int:
    """Rough size of a conversation: the characters of its strings."""
    fields = (message.values() for message in messages if isinstance(message, dict))
    return sum(len(value) for values in fields for value in values if isinstance(value, str))
