"""How much one step may carry: in tokens and, if some request has a TPOT target, in seconds. Knows no requests.

A step of D decodes over C tokens of context may take `allowance` seconds. A chunk of x tokens behind L takes

    c1 x + c3 (2 L x + x^2)  <=  allowance - (c0 + c1 D + c2 C)

The largest such x has a closed form. It is rounded down so that the chunk ends at a multiple of the attention split. A
step also has to end before a first token that it draws is due. A chunk that would delay that token goes into the next
step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from inferd.engine.sched.latency.step_time import Coefficients

GRAIN = 32
"""If less than a split is left, chunks end at multiples of this: a slow machine has no time for a whole split."""
MARGIN = 0.95
"""Share of the time that is planned: steps take longer than predicted, too."""
LEAST_ROUNDED = 0.875
"""Least share of a chunk that must be left after it is cut to end at a split."""


@dataclass(slots=True)
class StepBudget:
    """Budget left of one step without a time limit."""

    num_tokens: int

    def chunk(self, start: int, num_pending: int) -> int:
        """Tokens that a request may compute of the `num_pending` behind `start`."""
        del start
        return min(num_pending, self.num_tokens)

    def spend(self, start: int, num_tokens: int) -> None:
        """Take the tokens of a row out of the budget."""
        del start
        assert 0 < num_tokens <= self.num_tokens, f"{num_tokens} tokens spent of {self.num_tokens}"
        self.num_tokens -= num_tokens

    @property
    def seconds_left(self) -> float:
        """Seconds that drafts may take."""
        return inf

    def spend_drafts(self, num_drafts: int) -> None:
        """Take the drafts of a row out of the budget, when the rest of the step is planned."""
        assert 0 < num_drafts <= self.num_tokens, f"{num_drafts} drafts spent of {self.num_tokens} tokens"
        self.num_tokens -= num_drafts

    def end_by(self, due_s: float) -> None:
        """Make the step end by `due_s`, when a first token that it draws is due."""


@dataclass(slots=True)
class WholeBudget(StepBudget):
    """Budget of a step that cuts no prompt. Its first prompt may be longer than the budget, because no step has more
    room for it."""

    is_spent: bool = False

    def chunk(self, start: int, num_pending: int) -> int:
        del start
        return num_pending if num_pending <= self.num_tokens or not self.is_spent else 0

    def spend(self, start: int, num_tokens: int) -> None:
        del start
        assert num_tokens <= self.num_tokens or not self.is_spent, f"{num_tokens} tokens spent of {self.num_tokens}"
        self.num_tokens, self.is_spent = max(0, self.num_tokens - num_tokens), True


@dataclass(slots=True)
class TimedBudget(StepBudget):
    """Budget of a step that others wait for. Rows of one token are never delayed; their time is not in `left_s`."""

    left_s: float
    """Seconds left for chunks."""
    costs: Coefficients
    split: int
    floor: int = 0
    """Tokens that chunks get whatever they take, so that no prompt starves."""
    start_s: float = 0.0
    """Time at which the step begins."""
    taken_s: float = 0.0
    """Seconds that the rows so far take."""
    has_chunk: bool = False

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.left_s)

    def chunk(self, start: int, num_pending: int) -> int:
        most = min(num_pending, self.num_tokens)
        if most <= 1:
            return most
        num_tokens = min(most, max(self.floor, largest_chunk(self.costs, start, self.left_s, most)))
        if num_tokens == num_pending:
            return num_tokens
        num_tokens = round_down(start, num_tokens, self.split)
        # In the time that another chunk has left, a prompt would take a slot and blocks for next to nothing. Also, a
        # single token's time is not in `left_s`, so every prompt would begin with one.
        return num_tokens if num_tokens >= (GRAIN if self.has_chunk else 2) else 0

    def spend(self, start: int, num_tokens: int) -> None:
        assert 0 < num_tokens <= self.num_tokens, f"{num_tokens} tokens spent of {self.num_tokens}"
        self.num_tokens -= num_tokens
        if num_tokens > 1:
            self.has_chunk = True
            seconds = chunk_s(self.costs, start, num_tokens)
            self.taken_s += seconds
            self.left_s -= seconds
            self.floor = max(0, self.floor - num_tokens)

    def end_by(self, due_s: float) -> None:
        time_s = due_s - self.start_s
        # A token that is late even without more rows must not delay others for nothing.
        if self.taken_s <= time_s:
            self.left_s = min(self.left_s, MARGIN * time_s - self.taken_s)


def chunk_s(costs: Coefficients, start: int, num_tokens: int) -> float:
    """Seconds that a chunk adds to a step."""
    return num_tokens * (costs.token_s + costs.pair_s * (2 * start + num_tokens))


def largest_chunk(costs: Coefficients, start: int, seconds: float, most: int) -> int:
    """Tokens behind `start` that take at most `seconds`, from 0 to `most`."""
    if seconds <= 0.0:
        return 0
    linear = costs.token_s + 2.0 * costs.pair_s * start
    # The positive root of pair x^2 + linear x - seconds, in the form that does not subtract two near numbers.
    if seconds == inf:
        return most
    divisor = linear + sqrt(linear * linear + 4.0 * costs.pair_s * seconds)
    return most if 2.0 * seconds >= most * divisor else int(2.0 * seconds / divisor)


def round_down(start: int, num_tokens: int, split: int) -> int:
    """`num_tokens` cut so that the chunk behind `start` ends at a multiple of `split`.

    If that would leave more than an eighth of them for later, it ends at a multiple of `GRAIN` instead. If it reaches
    not even that, it is not cut.
    """
    end = start + num_tokens
    if (rounded := end - end % split - start) >= LEAST_ROUNDED * num_tokens:
        return rounded
    rounded = end - end % GRAIN - start
    return rounded if rounded > 1 else num_tokens
