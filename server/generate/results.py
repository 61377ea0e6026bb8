"""Collects the events of a request into its results: a plain answer is made from these."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from inferd.server.generate.events import (
    SCORED_TOKENS,
    Event,
    Finished,
    PromptRead,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from inferd.server.generate.packed import Packed
from inferd.server.generate.request import GenerateRequest
from inferd.server.schema.answers.generation import EndReason


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
