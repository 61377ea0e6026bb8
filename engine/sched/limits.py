"""The scheduler's limits, and the refusal of a request that can never fit them. Knows no queue and no blocks."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from inferd.engine.request import Request

ATTENTION_SPLIT = 256
"""Tokens of one attention tile. A chunk that ends inside a tile has it computed twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's limits. Raises `ValueError` for a limit under which nothing could run."""

    max_num_seqs: int
    """Most requests that hold a slot at once; the worker needs as many slots."""
    max_num_batched_tokens: int
    """Most tokens of one step."""
    max_model_len: int
    max_draws: int = 0
    """Most tokens that a step with drafts draws, accepted or not."""
    keeps_prompts_whole: bool = False
    """Whether a step computes whole prompts alone, as an encoder must. Then a step of one prompt may be longer."""
    drafts_follow: bool = False
    """Whether what makes drafts computes each step's tokens in that step, as a draft head does. Otherwise it computes
    them when it drafts."""
    ageing_s: float = 10.0
    """Seconds of waiting that are worth one level of priority."""
    watermark: float = 0.01
    """Share of the blocks that an admission leaves free for running requests."""
    chunk_split: int = ATTENTION_SPLIT
    """Chunks that are cut to meet a target end at multiples of this."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "chunk_split"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but got {getattr(self, name)}")
        if not 0 < self.ageing_s < inf:
            raise ValueError(f"ageing_s must be a positive number of seconds, but got {self.ageing_s}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be from 0 to below 1, but got {self.watermark}")


class Refusal(Exception):
    """A request that can never run here, or not in time. `limit` is the value that would be accepted."""

    def __init__(
        self, code: str, message: str, param: str | None, limit: int = 0, retry_after_s: float | None = None
    ) -> None:
        """`retry_after_s`: seconds after which the same request may be accepted; None: never."""
        super().__init__(message)
        self.code, self.message, self.param, self.limit = code, message, param, limit
        self.retry_after_s = retry_after_s


def check_fits(request: Request, max_model_len: int, cache_tokens: int) -> None:
    """Raise `Refusal` if prompt and `max_tokens` exceed the model's length, or what an empty cache can hold.

    The last token is sampled and never computed, so it takes a place in the model's length and none in the cache.
    """
    num_prompt, max_tokens = request.num_prompt, request.params.max_tokens
    num_sampled = min(max_tokens, 1)
    for limit, what in (
        (max_model_len, "the model's length"),
        (cache_tokens + num_sampled, "the KV cache"),
    ):
        if num_prompt + num_sampled > limit:
            most = limit - num_sampled
            message = f"the prompt has {num_prompt} tokens; {what} allows at most {most}"
            raise Refusal("context_length_exceeded", message, "prompt", most)
        if num_prompt + max_tokens > limit:
            most = limit - num_prompt
            message = (
                f"the prompt's {num_prompt} tokens and max_tokens {max_tokens} make {num_prompt + max_tokens}; "
                f"{what} allows {limit}, so max_tokens can be at most {most}"
            )
            raise Refusal("context_length_exceeded", message, "max_tokens", most)
