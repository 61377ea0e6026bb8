"""Seeded scenarios: every request gets exactly the text that its prompt and seed determine, and ends exactly once.

`core` drives the engine's core alone, `front` the router and the recovery with one engine after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.faults import Fault, make_front_scenario
from tests.sim.front import run_front, run_front_seed
from tests.sim.scenario import make_scenario
from tests.sim.simulation import run_seed

REGRESSIONS = Path(__file__).parent / "regressions.txt"
RUNS: dict[str, tuple[Callable[[int], None], Callable[[int], object]]] = {
    "core": (run_seed, make_scenario),
    "front": (run_front_seed, make_front_scenario),
}


@pytest.mark.parametrize("which", RUNS)
def test_seeds(which: str, seeds: range) -> None:
    run_all(which, seeds)


def test_regressions() -> None:
    for line in REGRESSIONS.read_text().splitlines():
        if line and not line.startswith("#"):
            which, seed, _ = line.split(maxsplit=2)
            run_all(which, [int(seed)])


def test_an_engine_may_hang_before_it_has_launched_anything() -> None:
    """Drawn once in thousands of seeds: the first turn of the loop launches nothing and never ends."""
    for seed in range(24, 30):
        run_front(replace(make_front_scenario(seed), lives={0: (Fault("hang", "step", 0),)}))


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_wire_may_go_silent(way: str) -> None:
    """From one of the first frames on none arrives, and no later number shows the gap."""
    for seed in range(8):
        for at in (1, 2, 5):
            run_front(replace(make_front_scenario(seed), lives={0: (Fault("mute", way, at),)}))


def run_all(which: str, seeds: Iterable[int]) -> None:
    """Fails with the line for `regressions.txt`, the command to run that seed alone, and its scenario."""
    run, describe = RUNS[which]
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            again = f"python -m pytest tests/sim/test_simulation.py -k {which} --sim-seed {seed}"
            pytest.fail(f"{which} {seed} {what[:120]}\n{again}\n{describe(seed)}", pytrace=False)
