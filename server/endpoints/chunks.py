"""The chunks of chat and text streams: their bytes, and the parts that plain answers and other protocols have too.

Such parts are the head, the usage, and log probabilities, in OpenAI's form for chat, its older form for text, and
vLLM's form for prompts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar, cast

import orjson

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.engine.api.wire.messages import WireLogprobs
from inferd.server.endpoints.long_lists import LongList, dumps
from inferd.server.endpoints.service import Service
from inferd.server.errors import table
from inferd.server.generate.events import ChoiceResult, Event, ResultBuilder, ScoredToken, TextDelta
from inferd.server.generate.request import GenerateRequest
from inferd.server.schema.answers.generation import (
    AnswerHead,
    ChatChunkChoice,
    ChatChunkHead,
    ChatChunkTail,
    ChatLogprobs,
    ChunkTail,
    Extra,
    PromptLogprobs,
    RankedLogprob,
    TextChunkChoice,
    TextHead,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from inferd.server.text.detokenizer import TokenBytes, token_text
from inferd.server.transport import sse

DONE = sse.event(b"[DONE]")
"""The last event of a stream of chunks."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The parts of an answer that the caller asked for."""

    name: str
    """Name of the model, as the caller wrote it."""
    is_stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    num_prompt_logprobs: int | None
    """Number of alternatives to show for each prompt token; None if the field was not given."""
    include_metrics: bool = False


@dataclass(slots=True)
class Counts:
    """Number of tokens of a stream so far."""

    num_prompt: int
    num_output: int = 0
    num_reasoning: int = 0
    cached_by_prompt: dict[int, int] = field(default_factory=dict)
    num_unsent: int = 0
    """Part of `num_output` whose text is held back."""
    _unsent_by_choice: dict[int, int] = field(default_factory=dict)

    def add(self, event: TextDelta, request: GenerateRequest) -> None:
        self.num_output += len(event.token_ids)
        self.num_reasoning += event.num_reasoning_tokens
        self.hold(event.choice, event.num_unsent_tokens)
        if event.choice % request.n == 0:
            prompt = event.choice // request.n
            self.cached_by_prompt[prompt] = max(self.cached_by_prompt.get(prompt, 0), event.num_cached_tokens)

    def hold(self, choice: int, num_unsent: int) -> None:
        """The text of `num_unsent` tokens of a choice is held back."""
        self.num_unsent += num_unsent - self._unsent_by_choice.get(choice, 0)
        self._unsent_by_choice[choice] = num_unsent

    def usage_sent(self) -> Usage:
        """The usage of the text that was sent."""
        num_output = self.num_output - self.num_unsent
        num_cached = sum(self.cached_by_prompt.values())
        return usage(self.num_prompt, num_output, num_cached, min(self.num_reasoning, num_output))

    def usage(self) -> Usage:
        return usage(self.num_prompt, self.num_output, sum(self.cached_by_prompt.values()), self.num_reasoning)


def usage(num_prompt: int, num_output: int, num_cached: int, num_reasoning: int) -> Usage:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def usage_of(request: GenerateRequest, choices: tuple[ChoiceResult, ...]) -> Usage:
    """A prompt and its cached tokens count once, as its first choice found them."""
    return usage(
        request.num_prompt_tokens,
        sum(len(choice.token_ids) for choice in choices),
        sum(choice.num_cached_tokens for choice in choices[:: request.n]),
        sum(choice.num_reasoning_tokens for choice in choices),
    )


def head(service: Service, request: GenerateRequest, options: AnswerOptions) -> AnswerHead:
    return {
        "created": int(time.time()),
        "model": options.name,
        "system_fingerprint": fingerprint(service, request),
        "seed": request.seed,
    }


def fingerprint(service: Service, request: GenerateRequest) -> str:
    """`system_fingerprint`, which changes if the same request may get another answer. Needs a ready engine."""
    model, adapter = service.model, request.params.adapter
    seen = (
        service.version,
        model.digest,
        model.defaults,
        service.router.replicas.numerics or service.router.replicas.ready.device,
        None if adapter is None else adapter.digest,
    )
    return "fp_" + hashlib.sha256(repr(seen).encode()).hexdigest()[:10]


class ChunkRendering:
    """Base of the renderings of chat and text: writes the chunks of a stream, or collects the events of a plain answer.

    The head of all chunks is encoded once. A chunk adds choices and, if asked for, usage.
    """

    keep_alive = sse.KEEP_ALIVE

    def __init__(
        self, head: ChatChunkHead | TextHead, service: Service, accepted: GenerateRequest, options: AnswerOptions
    ) -> None:
        """`head`: the fields that every chunk begins with."""
        self._prefix = orjson.dumps(head)[:-1] + b',"choices":'
        self._service, self._accepted, self._options = service, accepted, options
        self._counts = Counts(accepted.num_prompt_tokens)
        self._table = service.model.tokenizer.bytes
        self._introduced: set[int] = set()
        """Choices of which a chunk was sent."""

    @cached_property
    def _builder(self) -> ResultBuilder:
        """The results of a plain answer. A stream has none."""
        return ResultBuilder(self._accepted)

    def begin(self) -> bytes:
        """Nothing, because the first chunk of a choice has its first text."""
        return b""

    def end(self, extra: Extra) -> bytes:
        """[DONE], after a last chunk with usage and `extra` if the request includes usage."""
        if not self._options.include_usage:
            return DONE
        return self._write([], {**extra, "usage": self._counts.usage()}) + DONE

    def failure(self, error: RequestError | EngineDeadError) -> bytes:
        """The error as the last event, without [DONE]."""
        return sse.event(orjson.dumps(table.body_of(error)))

    def add(self, event: Event) -> None:
        self._builder.add(event)

    def _choice_chunk(self, choice: ChatChunkChoice | TextChunkChoice, tail: ChatChunkTail | None = None) -> bytes:
        """A chunk with one choice."""
        tail = tail or {}
        if self._options.include_usage:
            tail = {**tail, "usage": self._counts.usage_sent() if self._options.continuous_usage else None}
        return self._write([choice], tail)

    def _write(self, choices: Sequence[ChatChunkChoice | TextChunkChoice], tail: ChunkTail) -> bytes:
        ending = b"," + dumps(tail)[1:] if tail else b"}"
        return sse.event(self._prefix + dumps(choices) + ending)


T = TypeVar("T")
R = TypeVar("R")

_LONG = 16
"""Number of tokens from which on a list is written in pieces. As objects, a token with 20 alternatives takes 9 KB."""
LEAST_LOGPROB = -9999.0
"""OpenAI's value for "very unlikely", because JSON has no infinity."""


def chat_logprobs(token_bytes: TokenBytes, scored: Collection[ScoredToken]) -> ChatLogprobs:
    return {"content": _list(scored, lambda token: _chat_token(token_bytes, token.logprobs)), "refusal": None}


def text_logprobs(
    token_bytes: TokenBytes, scored: Collection[ScoredToken | None], num_top: int, first_id: int | None = None
) -> TextLogprobs:
    """Four lists of one length. The entry None stands for the prompt's first token, `first_id`, which has no score."""

    def column(show: Callable[[ScoredToken], R], first: R) -> Sequence[R]:
        return _list(scored, lambda token: first if token is None else show(token))

    # Only the prompt's first token has no log probability, so an answer without a prompt does not need its text.
    first_text = "" if first_id is None else _legacy_text(token_bytes, first_id)
    return {
        "tokens": column(lambda token: _legacy_text(token_bytes, token.logprobs.token_id), first_text),
        "token_logprobs": column(lambda token: _finite(token.logprobs.logprob), None),
        "top_logprobs": column(lambda token: _top_texts(token_bytes, token.logprobs, num_top), None),
        "text_offset": column(lambda token: token.offset, 0),
    }


def prompt_logprobs(token_bytes: TokenBytes, scored: Collection[ScoredToken | None], num_top: int) -> PromptLogprobs:
    return _list(scored, lambda token: None if token is None else _ranked(token_bytes, token.logprobs, num_top))


def _list(items: Collection[T], show: Callable[[T], R]) -> Sequence[R]:
    """The list of `show(item)`, written in pieces if it is long. Only `long_lists` may read its entries."""
    return [show(item) for item in items] if len(items) < _LONG else cast("list[R]", LongList(items, show))


def _chat_token(token_bytes: TokenBytes, logprobs: WireLogprobs) -> TokenLogprob:
    top = [_entry(token_bytes, token_id, logprob) for token_id, logprob in logprobs.top]
    return {**_entry(token_bytes, logprobs.token_id, logprobs.logprob), "top_logprobs": top}


def _entry(token_bytes: TokenBytes, token_id: int, logprob: float) -> TopLogprob:
    return {
        "token": token_text(token_bytes, token_id),
        "logprob": _finite(logprob),
        "bytes": list(token_bytes.of(token_id)),
    }


def _top_texts(token_bytes: TokenBytes, logprobs: WireLogprobs, num_top: int) -> dict[str, float]:
    top: dict[str, float] = {}
    # If two ids have one text, the likelier one keeps it. The chosen token is always in the list.
    for token_id, logprob in (*logprobs.top[:num_top], (logprobs.token_id, logprobs.logprob)):
        top.setdefault(_legacy_text(token_bytes, token_id), _finite(logprob))
    return top


def _legacy_text(token_bytes: TokenBytes, token_id: int) -> str:
    """The token's text. A token that is part of a character becomes "bytes:\\xe2\\x96", as in OpenAI's older API."""
    data = token_bytes.of(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _ranked(token_bytes: TokenBytes, logprobs: WireLogprobs, num_top: int) -> dict[str, RankedLogprob]:
    chosen = (logprobs.token_id, logprobs.logprob, logprobs.rank)
    ranks = [(token_id, logprob, i + 1) for i, (token_id, logprob) in enumerate(logprobs.top[:num_top])]
    return {
        str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(token_bytes, token_id)}
        for token_id, logprob, rank in (chosen, *ranks)
    }


def _finite(logprob: float) -> float:
    # NaN compares false, so it becomes the least value too.
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
