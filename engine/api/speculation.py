"""Which speculation a device gets, and for which requests nothing is guessed.

Speculation: tokens are guessed, and one step verifies several of them. It changes no token.
"""

from __future__ import annotations

from typing import Literal

from inferd.engine.api.memory.activations import RULE_PREFIX, RULE_WORDS
from inferd.engine.api.wire.params import SamplingParams

Speculative = Literal["none", "ngram", "suffix", "auto"]
"""Source of guessed tokens: none, what a request repeats of itself (ngram), that and recent answers (suffix), or what
suits the device (auto)."""


def speculative_on(device: Literal["cpu", "cuda"]) -> tuple[Speculative, str]:
    """Meaning of "auto" on a device, and the reason."""
    if device == "cpu":
        return "suffix", "tokens that repeat earlier ones are verified many at a time"
    return "none", "no GPU has shown yet what it gains there"


def reason_against(params: SamplingParams) -> str | None:
    """Why nothing is guessed for such a request; None if it is."""
    if params.pooling is not None or params.max_tokens < 2:
        return "it draws no more than one token"
    words = [word for word in params.bad_words if len(word) > 1]
    if len(words) > RULE_WORDS or any(len(word) > RULE_PREFIX + 1 for word in words):
        return (
            f"it has more than {RULE_WORDS} bad words of several tokens, or one of more than {RULE_PREFIX + 1} tokens"
        )
    return None
