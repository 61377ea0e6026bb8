"""The engine's core under seeded scenarios: every request gets exactly the text that its prompt and seed determine."""

from __future__ import annotations

import pytest

from tests.sim.scenario import make_scenario
from tests.sim.simulation import run_seed


def test_seeds(seeds: range) -> None:
    for seed in seeds:
        try:
            run_seed(seed)
        except Exception as error:
            again = f"python -m pytest tests/sim/test_simulation.py --sim-seed {seed}"
            pytest.fail(f"{again}\n{type(error).__name__}: {error}\n{make_scenario(seed)}")
