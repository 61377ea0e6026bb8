"""How much one step may carry, in tokens and, where someone waits for its next token, in seconds. Knows no requests.

A step of D decodes over C tokens of context may take `allowance` seconds, and a chunk of x tokens behind L takes

    c1 x + c3 (2 L x + x^2)  <=  allowance - (c0 + c1 D + c2 C)

whose largest x has a closed form. It is rounded down so that the chunk ends at a multiple of attention's split.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from inferd.engine.sched.step_time import Coefficients

GRAIN = 32
"""Where less than a split is left, chunks end at multiples of this: a slow machine has no time for a whole split."""


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


@dataclass(slots=True)
class TimedBudget(StepBudget):
    """A step that others wait for. Rows of one token are never held up; their time is not in `left_s`."""

    left_s: float
    """For chunks."""
    costs: Coefficients
    split: int
    floor: int = 0
    """Tokens that chunks get whatever they take, so that no prompt waits for ever."""

    def chunk(self, start: int, num_pending: int) -> int:
        most = min(num_pending, self.num_tokens)
        if most <= 1:
            return most
        num_tokens = min(most, max(self.floor, largest_chunk(self.costs, start, self.left_s, most)))
        return num_tokens if num_tokens == num_pending else round_down(start, num_tokens, self.split)

    def spend(self, start: int, num_tokens: int) -> None:
        assert 0 < num_tokens <= self.num_tokens, f"{num_tokens} tokens spent of {self.num_tokens}"
        self.num_tokens -= num_tokens
        if num_tokens > 1:
            self.left_s -= chunk_s(self.costs, start, num_tokens)
            self.floor = max(0, self.floor - num_tokens)


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
    """The most of `num_tokens` behind `start` that end at a multiple of `split`; of `GRAIN` where none does, and where
    not even that, all."""
    end = start + num_tokens
    for step in (split, GRAIN):
        rounded = end - end % step - start
        if rounded > 0:
            return rounded
    return num_tokens
