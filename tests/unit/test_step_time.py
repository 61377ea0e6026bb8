"""The step-time model finds the cost of steps despite disturbances, and reports its error."""

from __future__ import annotations

from fractions import Fraction
from math import exp
from random import Random

import pytest

from inferd.engine.sched.latency.step_time import (
    UNKNOWN,
    Coefficients,
    LeastSquares,
    PriorCosts,
    StepLoad,
    StepTimeModel,
    solve,
)
from inferd.engine.sched.plan import Row

PLANTED = PriorCosts(Coefficients(4e-3, 2e-5, 3e-8), Coefficients(6e-3, 3e-5, 4e-8, 4e-10))
SEEDS = {
    "half of it": PriorCosts(Coefficients(2e-3, 1e-5, 1.5e-8), Coefficients(2e-3, 1.5e-5, 1e-8, 1e-10)),
    "anything": UNKNOWN,
    "zeros": PriorCosts(Coefficients(0, 0, 0), Coefficients(0, 0, 0, 0)),
}


def truth(load: StepLoad) -> float:
    return (PLANTED.chunked if load.pairs else PLANTED.decode).predict(load)


def random_load(rng: Random) -> StepLoad:
    num_decodes = rng.randint(1, 256)
    rows = [Row(slot, rng.randint(1, 4000), 1, True) for slot in range(num_decodes)]
    if rng.random() < 0.5:
        rows.append(Row(num_decodes, rng.randint(0, 8000), rng.randint(2, 2048), False))
    return StepLoad.of(rows)


def worst(model: StepTimeModel, rng: Random) -> float:
    """The largest relative error over fresh loads."""
    loads = [random_load(rng) for _ in range(300)]
    return max(abs(model.predict(load) / truth(load) - 1) for load in loads)


def trained(
    seed: PriorCosts, num_steps: int, rng: Random, *, pauses: float = 0.0, slower: float = 1.0
) -> StepTimeModel:
    model = StepTimeModel(seed)
    for step in range(num_steps):
        load = random_load(rng)
        seconds = truth(load) * exp(rng.gauss(0, 0.05)) * (slower if step >= num_steps - 300 else 1.0)
        model.observe(load, seconds * (50 if rng.random() < pauses else 1))
    return model


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_planted_costs_are_found_through_noise(seed: PriorCosts) -> None:
    rng = Random(1)
    assert worst(StepTimeModel(seed), Random(2)) > 0.3, "the seed is right, and the test shows nothing"
    model = trained(seed, 600, rng)
    assert worst(model, Random(2)) < 0.1
    p50, p95 = model.error(0.5, 0.95)
    assert 0.02 < p50 < 0.06 < p95 < 0.15, "noise of 5% is what is left"


def test_pauses_of_the_machine_move_little() -> None:
    assert worst(trained(UNKNOWN, 1500, Random(3), pauses=0.01), Random(4)) < 0.15


@pytest.mark.parametrize("seed", [PLANTED, UNKNOWN], ids=["the truth", "anything"])
def test_steps_of_next_to_no_time_move_little(seed: PriorCosts) -> None:
    """If the host is late for the end of a step, its time is too long and that of the next one next to nothing. Prompts
    without decodes have no context, so a model that holds all else at 0 would predict no time at all."""
    errors = list[float]()
    for number in range(40):
        rng, model = Random(number), StepTimeModel(seed)
        for step in range(120):
            rows = [Row(slot, rng.randint(20, 300), 1, True) for slot in range(rng.choice((0, 0, 32, 60)))]
            prompts = [Row(100 + slot, 0, rng.randint(20, 200), False) for slot in range(rng.randint(1, 4))]
            load = StepLoad.of(prompts if not rows else rows + prompts if rng.random() < 0.4 else rows)
            if rng.random() < 0.1:
                model.observe(load, truth(load) + 0.02)
                model.observe(load, rng.choice((3e-6, 1e-5, 1e-4)))
            else:
                model.observe(load, truth(load))
            if step > 20:
                errors.append(abs(model.predict(load) / truth(load) - 1))
    assert sorted(errors)[len(errors) // 2] < 0.1


def test_many_steps_of_next_to_no_time_end_in_no_runaway() -> None:
    """Chunks of one size: a step and its tokens are told apart by nothing. A model that has fallen to next to no time
    must not believe its next measurements more than all others, or the equations have no solution."""
    seed = PriorCosts(UNKNOWN.decode, Coefficients(0.7, 0.14, 1e-6, 1e-8))
    for number in range(20):
        rng, model = Random(number), StepTimeModel(seed)
        for _ in range(300):
            load = StepLoad.of([Row(0, 256 * rng.randint(0, 8), 256, False)])
            is_found_done = rng.random() < 0.5
            model.observe(load, rng.choice((1e-6, 1e-5)) if is_found_done else 2 * seed.chunked.predict(load))


def test_next_to_no_time_eight_times_in_a_row_is_soon_forgotten() -> None:
    for number in range(10):
        rng, model, load = Random(number), StepTimeModel(PLANTED), StepLoad(200, 0, 200**2)
        for _ in range(8):
            model.observe(load, 1e-5)
        for _ in range(300):
            num_tokens = rng.randint(20, 300)
            other = StepLoad(num_tokens, rng.randint(0, 5000), num_tokens**2)
            model.observe(other, truth(other) * rng.uniform(0.95, 1.05))
        assert 0.5 < model.predict(load) / truth(load) < 1.5


def test_no_step_is_predicted_to_take_no_time() -> None:
    """Paces are tokens divided by predictions."""
    model = StepTimeModel(UNKNOWN)
    for _ in range(1000):
        model.observe(StepLoad(8, 1000, 0), 1e-9)
        model.observe(StepLoad(8, 1000, 16), 1e-9)
    for load in (StepLoad(0, 0, 0), StepLoad(1, 0, 0), StepLoad(8, 0, 16)):
        assert model.predict(load) > 0.0


def test_a_machine_that_became_slower_is_believed() -> None:
    model = trained(UNKNOWN, 1000, Random(5), slower=1.5)
    loads = [random_load(Random(i)) for i in range(100)]
    ratios = sorted(model.predict(load) / truth(load) for load in loads)
    assert 1.35 < ratios[50] < 1.6, "300 steps later, of which half are of either kind"


def test_what_a_straight_line_cannot_fit_ends_in_no_runaway() -> None:
    """Decodes of the same few rows whose time falls with context: every coefficient stays at 0 or above."""
    model, rng = StepTimeModel(UNKNOWN), Random(6)
    for step in range(20_000):
        load = StepLoad(26, 35_000 + 26 * (step % 300), 0)
        model.observe(load, (5.3e-3 - 1e-8 * (load.context - 35_000)) * exp(rng.gauss(0, 0.03)))
        assert abs(model.predict(load) / 5.2e-3 - 1) < 0.3 or step < 50
        costs = model.decode
        assert min(costs.step_s, costs.token_s, costs.context_s, costs.pair_s) >= 0.0
    assert model.error(0.95)[0] < 0.1


def test_the_same_steps_give_the_same_bits() -> None:
    first, second = (trained(UNKNOWN, 300, Random(7)) for _ in range(2))
    assert (first.decode, first.chunked, first.error(0.5)) == (second.decode, second.chunked, second.error(0.5))


def test_a_step_of_no_time_counts_nothing() -> None:
    model = StepTimeModel()
    model.observe(StepLoad(1, 1, 0), 0.0)
    assert (model.num_steps, model.error(0.5, 0.95)) == (0, (0.0, 0.0))


def test_a_load_is_counted_row_by_row() -> None:
    rows = [Row(0, 7, 1, True), Row(1, 10, 3, False), Row(2, 0, 4, True)]
    assert StepLoad.of(rows) == StepLoad(8, 7, (2 * 10 * 3 + 3**2) + 4**2)
    assert StepLoad.of(rows[:1]) == StepLoad(1, 7, 0)
    drafted = Row(3, 20, 4, True, num_to_draft=3, draft_start=18)
    assert StepLoad.of([rows[0], drafted]) == StepLoad(5, 7 + 20 + 21 + 22 + 23, 0, passes=3, draft_tokens=2 + 3)


def test_elimination_equals_exact_arithmetic() -> None:
    rng = Random(8)
    for size in (1, 2, 3, 4):
        factors = [[Fraction(rng.randint(-9, 9)) for _ in range(size)] for _ in range(size)]
        matrix = [[sum(f[i] * f[j] for f in factors) + (i == j) for j in range(size)] for i in range(size)]
        expected = [Fraction(rng.randint(-9, 9)) for _ in range(size)]
        totals = [sum(a * b for a, b in zip(row, expected, strict=True)) for row in matrix]
        found = solve([list(map(float, row)) for row in matrix], list(map(float, totals)))
        assert found == pytest.approx(list(map(float, expected)), rel=1e-9, abs=1e-9)


def test_a_coefficient_that_wants_below_nought_leaves_the_others_a_best_fit() -> None:
    """y = 2 a - b: with b held at 0, the best a is sum(a y) / sum(a a)."""
    squares, rng = LeastSquares(2, forgetting=0.9999999, prior=1e-9), Random(9)
    above = below = 0.0
    for _ in range(300):
        a, b = rng.random(), rng.random()
        squares._spread = 100.0
        squares.update([a, b], 2 * a - b)
        above, below = above + a * (2 * a - b), below + a * a
    assert squares.theta == pytest.approx([above / below, 0.0], rel=1e-4)
