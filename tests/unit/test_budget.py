"""The number of prompt tokens in a step: the closed form against brute force, rounding, and the floor."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from inferd.engine.sched.latency.budget import GRAIN, StepBudget, TimedBudget, chunk_s, largest_chunk, round_down
from inferd.engine.sched.latency.step_time import Coefficients
from inferd.engine.sched.limits import ATTENTION_SPLIT
from inferd.kernels.ops.paged_attention import ATTENTION_SPLIT as KERNEL_SPLIT

COSTS = Coefficients(5e-3, 2e-5, 3e-8, 4e-10)


def test_the_split_is_the_kernels() -> None:
    assert ATTENTION_SPLIT == KERNEL_SPLIT


def test_the_closed_form_is_the_largest_chunk_that_fits() -> None:
    rng = Random(1)
    for _ in range(2000):
        costs = Coefficients(0.0, rng.choice((0.0, 1e-6, 2e-5)), 0.0, rng.choice((0.0, 1e-10, 1e-8)))
        start, seconds, most = rng.randint(0, 50_000), rng.uniform(-0.01, 0.1), rng.randint(1, 3000)
        fits = [x for x in range(1, most + 1) if chunk_s(costs, start, x) <= seconds]
        brute = 0 if seconds <= 0 else max(fits, default=0)
        found = largest_chunk(costs, start, seconds, most)
        assert abs(found - brute) <= 1, "a rounding of the last digit apart"
        if found > brute:
            assert chunk_s(costs, start, found) == pytest.approx(seconds, rel=1e-9)
    assert largest_chunk(COSTS, 0, inf, 77) == 77
    assert largest_chunk(Coefficients(0, 0, 0, 0), 0, 1e-9, 77) == 77


@pytest.mark.parametrize(
    ("start", "num_tokens", "rounded"),
    [
        (0, 800, 768), (0, 700, 672), (100, 700, 668), (256, 256, 256), (0, 255, 224), (10, 60, 54), (10, 12, 12),
        (300, 300, 276),
    ],
)  # fmt: skip
def test_chunks_end_at_multiples_of_the_split(start: int, num_tokens: int, rounded: int) -> None:
    """A chunk ends at a multiple of 256, or of 32 if that would cost more than an eighth, or anywhere if no multiple of
    32 is near."""
    assert round_down(start, num_tokens, 256) == rounded


def test_chunks_of_a_step_take_no_more_time_together_than_there_is() -> None:
    rng = Random(2)
    for _ in range(500):
        seconds = rng.uniform(0.0, 0.05)
        budget, spent_s = TimedBudget(4096, seconds, COSTS, 256), 0.0
        for _ in range(6):
            start, num_pending = rng.randint(0, 9000), rng.randint(2, 3000)
            num_tokens = budget.chunk(start, num_pending)
            assert 0 <= num_tokens <= min(num_pending, budget.num_tokens)
            if num_tokens:
                assert num_tokens == num_pending or (start + num_tokens) % GRAIN == 0 or num_tokens <= GRAIN
                budget.spend(start, num_tokens)
                spent_s += chunk_s(COSTS, start, num_tokens) if num_tokens > 1 else 0.0
        assert spent_s <= seconds * (1 + 1e-9)


def test_a_single_token_is_never_held_up() -> None:
    assert TimedBudget(4, -1.0, COSTS, 256).chunk(9999, 1) == 1
    assert TimedBudget(4, -1.0, COSTS, 256).chunk(9999, 2) == 0


def test_the_floor_is_given_once() -> None:
    budget = TimedBudget(4096, -1.0, COSTS, 256, floor=256)
    assert budget.chunk(0, 1000) == 256
    budget.spend(0, 256)
    assert budget.chunk(0, 1000) == 0


def test_what_a_chunk_leaves_begins_no_prompt() -> None:
    """With time for 9 tokens after another chunk, a whole prompt of 9 runs, but no part of a longer one. Without
    another chunk a part runs. Time for one token gives no chunk."""
    nine_s = chunk_s(COSTS, 0, 9) * 1.001
    budget = TimedBudget(4096, chunk_s(COSTS, 0, 320) + nine_s, COSTS, 256)
    budget.spend(0, budget.chunk(0, 320))
    assert budget.left_s == pytest.approx(nine_s)
    assert budget.chunk(0, 1000) == 0
    assert budget.chunk(0, 9) == 9, "it is not cut"
    assert TimedBudget(4096, nine_s, COSTS, 256).chunk(0, 1000) == 9
    assert TimedBudget(4096, chunk_s(COSTS, 0, 1) * 1.001, COSTS, 256).chunk(0, 1000) == 0


def test_without_targets_tokens_alone_count() -> None:
    budget = StepBudget(100)
    assert budget.chunk(9, 60) == 60
    budget.spend(9, 60)
    assert budget.chunk(0, 60) == 40
