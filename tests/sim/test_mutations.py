"""Tests the simulation by planted bugs: each must fail within the seeds that run for every change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim import (
    cache_mutations,
    core_mutations,
    draft_mutations,
    group_mutations,
    left_mutations,
    recovery_mutations,
    router_mutations,
    sched_mutations,
    speculation_mutations,
    state_mutations,
    unload_mutations,
)
from tests.sim.conftest import MUTANT_SEEDS
from tests.sim.front import run_front_seed, run_left_seed
from tests.sim.models import run_models_seed
from tests.sim.planting import Mutation
from tests.sim.simulation import run_seed, run_with_drafts

CORE = (
    *cache_mutations.plant,
    *group_mutations.plant,
    *state_mutations.plant,
    *sched_mutations.plant,
    *core_mutations.plant,
)
FRONT = (*router_mutations.plant, *recovery_mutations.plant)
DRAFTS = (*speculation_mutations.plant, *draft_mutations.plant)
RUNS: dict[Callable[[int], object], tuple[Mutation, ...]] = {
    run_seed: CORE,
    run_with_drafts: DRAFTS,
    run_front_seed: FRONT,
    run_left_seed: tuple(left_mutations.plant),
    run_models_seed: tuple(unload_mutations.plant),
}
CASES = [(plant, run) for run, plants in RUNS.items() for plant in plants]
TELLING: dict[Callable[[int], object], tuple[int, ...]] = {
    run_seed: (64, 67, 94, 130, 134, 197, 272, 311, 912),
    run_with_drafts: (11, 12, 16, 37, 54, 78, 190, 212, 375, 432, 780, 5596),
    run_models_seed: (1, 10, 45),
    run_left_seed: (1, 5, 8, 9, 12, 14, 19, 33, 55, 323),
    run_front_seed: (22, 37, 66, 80, 85, 103, 106, 120, 129, 403, 514, 519),
}
"""Seeds that catch bugs which few others catch. They run before all others, which takes half of the time."""
CAUGHT = (AssertionError, KeyError)
"""Errors of a wrong engine or a wrong server. Any other error means that the mutation itself is wrong."""


def test_there_are_enough() -> None:
    assert len(CORE) >= 60
    assert len(DRAFTS) >= 20
    assert len(FRONT) >= 35
    assert len({plant.__name__ for plant, _ in CASES}) == len(CASES)


@pytest.mark.sampled(keep=54)
@pytest.mark.parametrize(("plant", "run"), CASES, ids=[plant.__name__ for plant, _ in CASES])
def test_caught(plant: Mutation, run: Callable[[int], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(CAUGHT):
            run_all(run)


def run_all(run: Callable[[int], object]) -> None:
    for seed in dict.fromkeys([*TELLING[run], *range(MUTANT_SEEDS)]):
        run(seed)
