"""Folds the events of a request into one result: what a plain answer is made of."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from inferd.engine.api.messages import FinishReason
from inferd.server.generate.events import Event, Finished, PromptRead, ScoredToken, TextDelta
from inferd.server.generate.request import GenerateRequest


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """A finished choice."""

    prompt: PromptRead | None
    text: str
    """Of the output alone."""
    token_ids: tuple[int, ...]
    scored: tuple[ScoredToken, ...]
    reason: FinishReason
    stop_reason: str | int | None
    num_cached_tokens: int


@dataclass(slots=True)
class _Growing:
    """A choice that still grows. Pieces are joined once, at the end."""

    prompt: PromptRead | None = None
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    end: Finished | None = None
    num_cached_tokens: int = 0

    def add(self, event: Event) -> None:
        match event:
            case PromptRead():
                self.prompt = event
            case TextDelta():
                self.pieces.append(event.text)
                self.token_ids.extend(event.token_ids)
                self.scored.extend(event.scored)
                self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
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
        )


async def fold(request: GenerateRequest, events: AsyncIterator[Event]) -> tuple[ChoiceResult, ...]:
    """Every choice of `request`, in order, once the last has ended. Raises what the events raise."""
    growing = [_Growing() for _ in range(request.num_choices)]
    async for event in events:
        growing[event.choice].add(event)
    return tuple(choice.result() for choice in growing)
