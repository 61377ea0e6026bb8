"""How long the next step may take, so that every running request stays inside its TPOT target.

Without such a target among the decodes, only first tokens that are due bound the step.

A request's TPOT is a mean, so its n-th token is due at first token + (n - 1) target. A fast request has time in hand; a
slow one has to catch up. Both are bounded, so that no single gap is long and no lost request blocks the prompts. Knows
entries and the step-time model; no queue, no blocks and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from inferd.engine.sched.entry import Entry
from inferd.engine.sched.latency.budget import MARGIN, StepBudget, TimedBudget, WholeBudget, chunk_s, largest_chunk
from inferd.engine.sched.latency.step_time import Coefficients, PriorCosts, StepLoad, StepTimeModel
from inferd.engine.sched.plan import Row

STARVED_STEPS = 8
"""Steps without time for a chunk after which the next one carries a split all the same. Decodes then run slower by an
eighth of a split, and prompts are not starved."""
MOST_AT_ONCE, LEAST_AT_ONCE = 2.0, 0.5
"""Bounds of a step's time, in targets: for a request with time in hand, and for one that is late."""


class Timing(NamedTuple):
    """When a step ended (monotonic), and the seconds that it took the device."""

    ended_s: float
    own_s: float
    idle_s: float = 0.0
    """Seconds between the end of the step before and the launch of this one."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast prompts are computed beside the current decodes."""

    costs: Coefficients
    base_s: float
    """Seconds of a step without a chunk."""
    chunk_tokens: float
    """Tokens of prompts that a step carries."""

    def seconds(self, num_tokens: int, depth: int) -> float:
        """Seconds to compute so many prompt tokens, the middle one behind `depth`."""
        num_full, rest = divmod(num_tokens, self.chunk_tokens)
        full_s = self.base_s + chunk_s(self.costs, depth, int(self.chunk_tokens) or 1)
        rest_s = self.base_s + chunk_s(self.costs, depth, int(rest)) if rest else 0.0
        return num_full * full_s + rest_s

    @property
    def tokens_per_s(self) -> float:
        return self.chunk_tokens / (self.base_s + chunk_s(self.costs, 0, int(self.chunk_tokens) or 1))


class LatencyPolicy:
    """Decides how much each step may carry, by the step-time model. Without targets every step carries all it can."""

    def __init__(
        self, max_num_batched_tokens: int, chunk_split: int, prior: PriorCosts, *, keeps_prompts_whole: bool = False
    ) -> None:
        self.model = StepTimeModel(prior)
        self._keeps_prompts_whole = keeps_prompts_whole
        self.num_timed = 0
        """Live requests with a target."""
        self._max_num_batched_tokens, self._split = max_num_batched_tokens, chunk_split
        self._launched: deque[tuple[StepLoad, float]] = deque()
        """Launched steps that were not applied, with their predicted seconds."""
        self._num_starved = 0
        """Consecutive steps that had no time for any chunk."""

    @property
    def launched_s(self) -> float:
        """Predicted seconds of all launched steps."""
        return sum([seconds for _, seconds in self._launched])

    @property
    def next_predicted_s(self) -> float:
        """Predicted seconds of the oldest launched step; 0 if there is none."""
        return self._launched[0][1] if self._launched else 0.0

    def for_step(self, decodes: Sequence[Entry], now: float) -> StepBudget:
        """Budget of a step that begins when all launched ones have ended. `decodes`: entries that draw a token."""
        if self._keeps_prompts_whole:
            return WholeBudget(self._max_num_batched_tokens)
        if not self.num_timed:
            return StepBudget(self._max_num_batched_tokens)
        start_s = now + self.launched_s
        allowance_s = self._allowance(decodes, start_s)
        costs = self.model.chunked
        base_s = costs.predict(StepLoad(len(decodes), _context(decodes), 0))
        floor = self._split if self._num_starved >= STARVED_STEPS else 0
        left_s = allowance_s - base_s
        return TimedBudget(self._max_num_batched_tokens, left_s, costs, self._split, floor, start_s, base_s)

    def launched(self, rows: Sequence[Row], *, has_prompts: bool | None) -> None:
        """Record a planned step.

        `has_prompts`: whether a request has more than one token to compute, or waits to. None: a suspect runs alone,
        and the step neither serves the prompts of others nor starves them.
        """
        load = StepLoad.of(rows)
        self._launched.append((load, self.model.predict(load)))
        if has_prompts is not None:
            self._num_starved = self._num_starved + 1 if has_prompts and not load.pairs else 0

    def applied(self, timing: Timing | None) -> None:
        """Record the end of the oldest launched step. Without `timing` nothing is learned from it."""
        load, _ = self._launched.popleft()
        if timing is not None:
            self.model.observe(load, timing.own_s)

    def pace(self, decodes: Sequence[Entry], depth: int) -> Pace:
        """Pace of prompts `depth` tokens deep, beside these decodes."""
        costs = self.model.chunked
        base_s = costs.predict(StepLoad(len(decodes), _context(decodes), 0))
        targets_s = [entry.request.scheduling.tpot_target_s for entry in decodes]
        allowance_s = MARGIN * min([target_s for target_s in targets_s if target_s is not None], default=inf)
        room = max(1, self._max_num_batched_tokens - len(decodes))
        num_tokens = largest_chunk(costs, depth, allowance_s - base_s, room)
        return Pace(costs, base_s, max(num_tokens, min(room, self._split / STARVED_STEPS)))

    def prompts_s(self, num_tokens: int, depth: int) -> float:
        """Predicted seconds of a step of prompts alone, with `num_tokens` to compute behind `depth`, or as many of them
        as fit."""
        return self.pace((), depth).seconds(min(num_tokens, self._max_num_batched_tokens), depth)

    def _allowance(self, decodes: Iterable[Entry], start_s: float) -> float:
        """Seconds that a step starting at `start_s` may take; infinite if no decode has a target."""
        least_s = inf
        for entry in decodes:
            request = entry.request
            target_s = request.scheduling.tpot_target_s
            if target_s is None:
                continue
            due_s = target_s
            if entry.first_token_s is not None:
                num_after = request.total - request.num_prompt - entry.first_output + 1
                due_s = entry.first_token_s + num_after * target_s - start_s
            due_s = max(LEAST_AT_ONCE * target_s, min(MOST_AT_ONCE * target_s, due_s))
            if due_s < least_s:
                least_s = due_s
        return MARGIN * least_s


def _context(decodes: Iterable[Entry]) -> int:
    return sum([entry.request.scheduled for entry in decodes])
