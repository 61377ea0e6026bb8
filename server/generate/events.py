"""What happens to a choice, as typed events: the only thing that answers, streamed or plain, are made of.

The order for each choice is `PromptRead` (where asked for), any number of deltas, one `Finished`. Every token comes
with a `TextDelta`, before what its text became. Choices interleave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from inferd.engine.api.wire.messages import FinishReason, WireLogprobs

EndReason = FinishReason | Literal["repetition", "tool_calls"]
"""Why a choice ended; that it repeats itself or has called tools is seen here and not by the engine."""

REPETITION_DETECTED = "repetition_detected"
"""The `stop_reason` of such a choice, in vLLM's words."""


class ScoredToken(msgspec.Struct, frozen=True, gc=False):
    """A token with its log probabilities and its place in the text. Made of a whole prompt in one turn of the loop."""

    logprobs: WireLogprobs
    offset: int
    """Characters of the choice's text before this token."""


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The prompt went through the model; sent where its text or its log probabilities were asked for."""

    choice: int
    text: str
    """The prompt as text, where it is echoed."""
    scored: tuple[ScoredToken | None, ...]
    """One entry a prompt token, the first None; empty where not asked for."""


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """More of a choice. Text may follow its token late: while a character or a stop string is unfinished.

    Made once a token: a struct takes a fifth of the time of a frozen dataclass.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    scored: tuple[ScoredToken, ...]
    """One for each of `token_ids`, where asked for."""
    num_cached_tokens: int
    num_reasoning_tokens: int = 0
    """Tokens of this choice, these or earlier ones, that are now known to be reasoning."""
    num_unsent_tokens: int = 0
    """Tokens of this choice, these or earlier ones, whose text is held back: a part of a character, or what may become
    a stop string."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model reasons."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; its arguments follow."""

    choice: int
    index: int
    """Among the choice's calls."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments, as JSON."""

    choice: int
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The choice is complete."""

    choice: int
    reason: EndReason
    stop_reason: str | int | None
    """The caller's stop string or stop token id that ended it; None where the model or a limit did."""


Event = PromptRead | TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | Finished
