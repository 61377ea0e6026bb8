"""The record of a sequence that ended: its times and token counts, and the latencies that follow from them.

It is given to the trace that the request belongs to, if traces are on. Knows no library of traces: `tracing` is loaded
on demand.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from inferd.engine.api.wire.messages import FinishReason
from inferd.engine.api.wire.params import SchedulingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A sequence that ended. Fields in `_s` are monotonic times, and None if the sequence never came so far."""

    scheduling: SchedulingParams
    scheduled_s: float | None
    first_token_s: float | None
    pooled_s: float | None = None
    """End of the step that gave its vector; None for a sequence that generates."""
    finished_s: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason
    e2e_target_s: float | None = None

    def attainment(self) -> dict[str, bool]:
        """Latency -> whether its target was met, for latencies with a target.

        A token that never came missed its target. An answer of one token has no TPOT and meets any target.
        """
        is_served = self.finish_reason in ("stop", "length")
        seen = (
            ("ttft", self.scheduling.ttft_target_s, self.ttft_s),
            ("tpot", self.scheduling.tpot_target_s, self.tpot_s or 0.0),
            ("e2e", self.e2e_target_s, self.e2e_s),
        )
        return {
            name: is_served and value is not None and value <= target
            for name, target, value in seen
            if target is not None
        }

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.scheduling.arrival_s

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_s is None else self.scheduled_s - self.scheduling.arrival_s

    @property
    def prefill_s(self) -> float | None:
        """Time from its first step to its first token or its vector."""
        ended_s = self.pooled_s if self.first_token_s is None else self.first_token_s
        return None if self.scheduled_s is None or ended_s is None else ended_s - self.scheduled_s

    @property
    def decode_s(self) -> float | None:
        """Time from its first token to its end."""
        return None if self.first_token_s is None else self.finished_s - self.first_token_s

    @property
    def e2e_s(self) -> float:
        return self.finished_s - self.scheduling.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Decode time per token after the first, or None if there is only one token."""
        if self.decode_s is None or self.num_generation_tokens < 2:
            return None
        return self.decode_s / (self.num_generation_tokens - 1)


class RequestTrace(Protocol):
    """Collects what became of a request's sequences."""

    def ended(self, record: RequestRecord, num_restarts: int, model: str) -> None:
        """A sequence of a model ended. `num_restarts`: engines that died while they had it."""
        ...


current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)
"""The trace of the HTTP request that the present task answers."""
