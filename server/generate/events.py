"""Typed events of a choice, and the results that they are collected into. All answers, streamed or plain, are made from
them.

The order for each choice is `PromptRead` (if asked for), any number of deltas, one `Finished`. Every token comes with a
`TextDelta`, before the events made from its text. Choices interleave.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from inferd.engine.api.wire.messages import WireLogprobs
from inferd.server.generate.request import GenerateRequest
from inferd.server.schema.answers.generation import EndReason
from inferd.server.schema.strict_json import exact

T = TypeVar("T")

_AT_ONCE = 64
"""Values in a pack. With 20 alternatives, 64 scored tokens take 20 KB packed, and 200 KB while they are read."""
_pack = msgspec.msgpack.Encoder().encode


class Packed(Collection[T]):
    """Values in packs of 64. Each iteration unpacks them again, one pack at a time."""

    __slots__ = ("_decoder", "_num_packed", "_open", "_packs")

    def __init__(self, decoder: msgspec.msgpack.Decoder[tuple[T, ...]], first: Sequence[T] = ()) -> None:
        self._decoder = decoder
        self._packs: list[bytes] = []
        self._num_packed = 0
        self._open = list(first)

    def extend(self, values: Sequence[T]) -> None:
        self._open += values
        if len(self._open) < _AT_ONCE:
            return
        num_left = len(self._open) % _AT_ONCE
        for start in range(0, len(self._open) - num_left, _AT_ONCE):
            self._packs.append(exact(_pack(self._open[start : start + _AT_ONCE])))
            self._num_packed += _AT_ONCE
        self._open = self._open[len(self._open) - num_left :]

    def __len__(self) -> int:
        return self._num_packed + len(self._open)

    def __iter__(self) -> Iterator[T]:
        for pack in self._packs:
            yield from self._decoder.decode(pack)
        yield from self._open

    def __contains__(self, value: object) -> bool:
        return any(value == other for other in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Packed) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


REPETITION_DETECTED = "repetition_detected"
"""vLLM's `stop_reason` for a choice that repeats itself."""


class ScoredToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token with its log probabilities."""

    logprobs: WireLogprobs
    offset: int
    """Number of characters of the choice's text before this token."""


SCORED_TOKENS = msgspec.msgpack.Decoder(tuple[ScoredToken, ...])
SCORED_PROMPT = msgspec.msgpack.Decoder(tuple[ScoredToken | None, ...])
"""Decoders for `Packed`. The first token of a prompt has no score."""


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The model has read the prompt. Sent if the request echoes the prompt or scores it."""

    choice: int
    text: str
    """Text of the prompt if it is echoed, else empty."""
    scored: Collection[ScoredToken | None]
    """One entry for each prompt token, the first None; empty if not asked for."""


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """New tokens and text of a choice. Text may come after its token, if a character or a stop string is incomplete.

    One is made for each token: a struct takes a fifth of the time of a frozen dataclass.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    scored: tuple[ScoredToken, ...]
    """One entry for each of `token_ids` if asked for, else empty."""
    num_cached_tokens: int
    num_reasoning_tokens: int = 0
    """Number of tokens of this choice, these or earlier ones, now known to be reasoning."""
    num_unsent_tokens: int = 0
    """Number of tokens of this choice, these or earlier ones, whose text is held back: a part of a character, or of a
    possible stop string."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of the model's reasoning."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; its arguments follow."""

    choice: int
    index: int
    """Index among the choice's calls."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """New text of a call's arguments, as JSON, or of a custom tool's input."""

    choice: int
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The choice is complete."""

    choice: int
    reason: EndReason
    stop_reason: str | int | None
    """The caller's stop string or stop token id that ended it; None if the model or a limit did."""


Event = PromptRead | TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | Finished


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A call as the model wrote it."""

    id: str
    name: str
    arguments: str
    """JSON, unless the answer was cut off or the model wrote something else; of a custom tool its input."""


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """A finished choice."""

    prompt: PromptRead | None
    text: str
    """Text of the output, without reasoning and calls if the model's format is known."""
    token_ids: tuple[int, ...]
    scored: Collection[ScoredToken]
    reason: EndReason
    stop_reason: str | int | None
    num_cached_tokens: int
    reasoning: str = ""
    calls: tuple[CalledTool, ...] = ()
    num_reasoning_tokens: int = 0


@dataclass(slots=True)
class _ChoiceBuilder:
    """Collects one choice. Pieces of text are joined once, at the end."""

    prompt: PromptRead | None = None
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: Packed[ScoredToken] = field(default_factory=lambda: Packed(SCORED_TOKENS))
    end: Finished | None = None
    num_cached_tokens: int = 0
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[ToolCallStart, list[str]]] = field(default_factory=list)
    num_reasoning_tokens: int = 0

    def add(self, event: Event) -> None:
        match event:
            case PromptRead():
                self.prompt = event
            case TextDelta():
                self.pieces.append(event.text)
                self.token_ids.extend(event.token_ids)
                self.scored.extend(event.scored)
                self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
                self.num_reasoning_tokens += event.num_reasoning_tokens
            case ReasoningDelta():
                self.reasoning.append(event.text)
            case ToolCallStart():
                self.calls.append((event, []))
            case ToolCallArguments():
                self.calls[event.index][1].append(event.text)
            case Finished():
                self.end = event

    def result(self) -> ChoiceResult:
        assert self.end is not None, "every accepted choice ends once"
        return ChoiceResult(
            self.prompt,
            "".join(self.pieces),
            tuple(self.token_ids),
            self.scored,
            self.end.reason,
            self.end.stop_reason,
            self.num_cached_tokens,
            "".join(self.reasoning),
            tuple(CalledTool(start.id, start.name, "".join(pieces)) for start, pieces in self.calls),
            self.num_reasoning_tokens,
        )


class ResultBuilder:
    """Collects every choice of one request."""

    def __init__(self, request: GenerateRequest) -> None:
        self._choices = [_ChoiceBuilder() for _ in range(request.num_choices)]

    def add(self, event: Event) -> None:
        self._choices[event.choice].add(event)

    def results(self) -> tuple[ChoiceResult, ...]:
        """The choices in order. Call it once the last has ended."""
        return tuple(choice.result() for choice in self._choices)
