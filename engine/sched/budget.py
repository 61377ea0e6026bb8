"""How much one step may carry. Knows no requests: a policy turns what it knows of a step into a `StepBudget`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepBudget:
    """What is left of one step."""

    num_tokens: int

    def spend(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= self.num_tokens, f"{num_tokens} tokens spent of {self.num_tokens}"
        self.num_tokens -= num_tokens


@dataclass(frozen=True, slots=True)
class ThroughputBudget:
    """Every step may carry the same: as many tokens as the device takes at once."""

    max_num_batched_tokens: int

    def for_step(self) -> StepBudget:
        return StepBudget(self.max_num_batched_tokens)
