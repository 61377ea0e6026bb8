"""The common parts of chat and text answers: the head, the usage, and the bytes of a chunk."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import orjson

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.endpoints.long_lists import dumps
from inferd.server.endpoints.service import Service
from inferd.server.errors import table as errors
from inferd.server.generate.events import Event, TextDelta
from inferd.server.generate.request import GenerateRequest
from inferd.server.generate.results import ChoiceResult, ResultBuilder
from inferd.server.schema.answers.chat import ChatChunkChoice, ChatChunkHead, ChatChunkTail
from inferd.server.schema.answers.completions import TextChunkChoice, TextHead
from inferd.server.schema.answers.generation import AnswerHead, ChunkTail, Extra, Usage
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
        return sse.event(orjson.dumps(errors.body_of(error)))

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
