"""Typed events of a choice. All answers, streamed or plain, are made from them.

The order for each choice is `PromptRead` (if asked for), any number of deltas, one `Finished`. Every token comes with a
`TextDelta`, before the events made from its text. Choices interleave.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from inferd.engine.api.wire.messages import WireLogprobs
from inferd.server.schema.answers.generation import EndReason

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
