"""The simulation is only worth what it catches: planted bugs, every one of which must fail within a few seeds."""

from __future__ import annotations

import pytest

from tests.sim.group_mutations import GROUP_MUTATIONS
from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.simulation import run_seed

ALL = (*MUTATIONS, *GROUP_MUTATIONS)
NUM_SEEDS = 300
CAUGHT = (AssertionError, KeyError)
"""What a wrong engine raises; anything else is a wrong mutation."""


def test_there_are_enough() -> None:
    assert len({plant.__name__ for plant in ALL}) == len(ALL) >= 40


@pytest.mark.parametrize("plant", ALL, ids=lambda plant: plant.__name__)
def test_caught(plant: Mutation) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(CAUGHT):
            _run_all()


def _run_all() -> None:
    for seed in range(NUM_SEEDS):
        run_seed(seed)
