"""How much one step may carry, in tokens and, where someone waits for its next token, in seconds. Knows no requests.

A step of D decodes over C tokens of context may take `allowance` seconds, and a chunk of x tokens behind L takes

    c1 x + c3 (2 L x + x^2)  <=  allowance - (c0 + c1 D + c2 C)

whose largest x has a closed form. It is rounded down so that the chunk ends at a multiple of attention's split. A step
ends besides by when a first token that it draws is due: what would hold that one up goes into the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from inferd.engine.sched.latency.step_time import Coefficients

GRAIN = 32
"""Where less than a split is left, chunks end at multiples of this: a slow machine has no time for a whole split."""
MARGIN = 0.95
"""Of the time there is: steps do not take what they are predicted to take."""
LEAST_ROUNDED = 0.875
"""Of a chunk that is cut to end at a split, what must be left."""


@dataclass(slots=True)
class StepBudget:
    """What is left of one step that may take as long as it takes."""

    num_tokens: int

    def chunk(self, start: int, num_pending: int) -> int:
        """Tokens that a request may compute of the `num_pending` behind `start`."""
        del start
        return min(num_pending, self.num_tokens)

    def spend(self, start: int, num_tokens: int) -> None:
        """A row takes so many."""
        del start
        assert 0 < num_tokens <= self.num_tokens, f"{num_tokens} tokens spent of {self.num_tokens}"
        self.num_tokens -= num_tokens

    def end_by(self, due_s: float) -> None:
        """The first token of a row is due then."""


@dataclass(slots=True)
class TimedBudget(StepBudget):
    """A step that others wait for. Rows of one token are never held up; their time is not in `left_s`."""

    left_s: float
    """For chunks."""
    costs: Coefficients
    split: int
    floor: int = 0
    """Tokens that chunks get whatever they take, so that no prompt waits for ever."""
    start_s: float = 0.0
    """When the step begins."""
    taken_s: float = 0.0
    """By what is in it."""
    has_chunk: bool = False

    def chunk(self, start: int, num_pending: int) -> int:
        most = min(num_pending, self.num_tokens)
        if most <= 1:
            return most
        num_tokens = min(most, max(self.floor, largest_chunk(self.costs, start, self.left_s, most)))
        if num_tokens == num_pending:
            return num_tokens
        num_tokens = round_down(start, num_tokens, self.split)
        # With what another chunk has left a prompt would begin, and hold a slot and blocks, for next to nothing; and a
        # single token's time is not in `left_s`: every prompt would begin with one.
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
        # Who is late whatever is added holds nobody up: others would be late for nothing.
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
    """The most of `num_tokens` behind `start` that end at a multiple of `split`; of `GRAIN` where that would leave more
    than an eighth of them to prompts whose turn is later, and all where not even that ends anywhere."""
    end = start + num_tokens
    if (rounded := end - end % split - start) >= LEAST_ROUNDED * num_tokens:
        return rounded
    rounded = end - end % GRAIN - start
    return rounded if rounded > 1 else num_tokens
