"""Collects the events of a request into its results: a plain answer is made from these."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from inferd.server.generate.events import (
    EndReason,
    Event,
    Finished,
    PromptRead,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from inferd.server.generate.request import GenerateRequest
from inferd.server.text.json_bytes import exact


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it."""

    id: str
    name: str
    arguments: str
    """JSON, unless the answer was cut off or the model wrote something else."""


_PACKED_AT_ONCE = 64
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(tuple[ScoredToken, ...]).decode


class PackedScores(Collection[ScoredToken]):
    """Scored tokens of one choice. With 20 alternatives a token takes 300 bytes packed, and 3,000 as objects."""

    __slots__ = ("_num_packed", "_open", "_packs")

    def __init__(self) -> None:
        self._packs: list[bytes] = []
        self._num_packed = 0
        self._open: list[ScoredToken] = []

    def extend(self, scored: Sequence[ScoredToken]) -> None:
        self._open += scored
        if len(self._open) >= _PACKED_AT_ONCE:
            self._packs.append(exact(_pack(self._open)))
            self._num_packed += len(self._open)
            self._open = []

    def __len__(self) -> int:
        return self._num_packed + len(self._open)

    def __iter__(self) -> Iterator[ScoredToken]:
        for pack in self._packs:
            yield from _unpack(pack)
        yield from self._open

    def __contains__(self, token: object) -> bool:
        return any(token == other for other in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedScores) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


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
    calls: tuple[ToolCall, ...] = ()
    num_reasoning_tokens: int = 0


@dataclass(slots=True)
class _ChoiceBuilder:
    """Collects one choice. Pieces of text are joined once, at the end."""

    prompt: PromptRead | None = None
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: PackedScores = field(default_factory=PackedScores)
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
            tuple(ToolCall(start.id, start.name, "".join(pieces)) for start, pieces in self.calls),
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
