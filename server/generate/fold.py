"""Folds the events of a request into one result: what a plain answer is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it."""

    id: str
    name: str
    arguments: str
    """JSON, where the answer was not cut off and the model wrote any."""


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """A finished choice."""

    prompt: PromptRead | None
    text: str
    """Of the output alone, without reasoning and calls where those are told from it."""
    token_ids: tuple[int, ...]
    scored: tuple[ScoredToken, ...]
    reason: EndReason
    stop_reason: str | int | None
    num_cached_tokens: int
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    num_reasoning_tokens: int = 0


@dataclass(slots=True)
class _Growing:
    """A choice that still grows. Pieces are joined once, at the end."""

    prompt: PromptRead | None = None
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
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
            tuple(self.scored),
            self.end.reason,
            self.end.stop_reason,
            self.num_cached_tokens,
            "".join(self.reasoning),
            tuple(ToolCall(start.id, start.name, "".join(pieces)) for start, pieces in self.calls),
            self.num_reasoning_tokens,
        )


class Fold:
    """Every choice of one request."""

    def __init__(self, request: GenerateRequest) -> None:
        self._growing = [_Growing() for _ in range(request.num_choices)]

    def add(self, event: Event) -> None:
        self._growing[event.choice].add(event)

    def results(self) -> tuple[ChoiceResult, ...]:
        """The choices in order, once the last has ended."""
        return tuple(choice.result() for choice in self._growing)
