"""The scheduler's counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferd.engine.speculation.ports import MOST_DRAFTS


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    num_prompt_tokens: int = 0
    """Prompt positions computed, including those computed again after a preemption."""
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    """Hits of first admissions only: a resumed request that finds its own blocks is not counted."""
    prefix_stateless_tokens: int = 0
    """Prompt tokens whose KV first admissions found, with no recurrent state behind them."""
    num_shed: int = 0
    """Requests refused because their first token would have come too late."""
    num_draft_rows: int = 0
    """Rows with drafts."""
    num_drafts: int = 0
    accepted_drafts: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    """Accepted drafts, by their place in the row."""

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        self.num_draft_rows += 1
        self.num_drafts += num_drafts
        for place in range(num_accepted):
            self.accepted_drafts[place] += 1
