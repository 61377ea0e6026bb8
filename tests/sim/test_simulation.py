"""Seeded scenarios: every request gets exactly the text that its prompt and seed determine, and ends exactly once.

`core` drives the engine's core alone, `front` the router and the recovery with one engine after another, `left` too,
with many engines that find what the ones before left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from inferd.engine.sched.entry import Entry
from inferd.engine.sched.plan import Row, RowResult
from inferd.engine.sched.scheduler import Scheduler
from tests.sim.faults import Fault, make_front_scenario, make_left_scenario
from tests.sim.front import run_front, run_front_seed, run_left_seed
from tests.sim.models import make_model_scenario, run_models_seed
from tests.sim.scenario import make_scenario
from tests.sim.simulation import run_seed, run_with_drafts
from tests.sim.test_mutations import TELLING

REGRESSIONS = Path(__file__).parent / "regressions.txt"
RUNS: dict[str, tuple[Callable[[int], None], Callable[[int], object]]] = {
    "core": (run_seed, make_scenario),
    "front": (run_front_seed, make_front_scenario),
    "left": (run_left_seed, make_left_scenario),
    "models": (run_models_seed, lambda seed: [make_model_scenario(2 * seed + i) for i in range(2)]),
}


@pytest.mark.parametrize("which", ["models", "left"])
def test_fewer_seeds(which: str, seeds: range) -> None:
    """Each runs two servers' worth of requests, or many engines."""
    run_all(which, [seed for seed in seeds if seed % 4 == 0])


@pytest.mark.parametrize("which", ["core", "front"])
def test_seeds(which: str, seeds: range) -> None:
    run_all(which, seeds)


@pytest.mark.parametrize("which", RUNS)
def test_telling_seeds(which: str) -> None:
    """With these and half of the seeds of `test_seeds`, every planted bug is caught."""
    run_all(which, TELLING[RUNS[which][0]])


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


def test_a_device_may_accept_fewer_drafts_than_it_could(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next row draws again what was not given, so that no token is lost."""
    accepted = Row.accepted
    monkeypatch.setattr(Row, "accepted", lambda self, drawn: max(1, accepted(self, drawn) - 1))
    for seed in range(60):
        run_with_drafts(seed)


def test_the_seeds_verify_drafts_in_every_situation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted, rejected, and both; across blocks, at the end of the context, and beside all else that may happen."""
    seen: Counter[str] = Counter()
    apply_row = Scheduler._apply_row

    def noted(self: Scheduler, entry: Entry, row: Row, result: RowResult) -> None:
        if row.num_drafts:
            num_accepted, num_drafts = len(result.token_ids) - 1, row.num_drafts
            seen["draft model"] += row.num_to_draft > 0
            seen["behind"] += row.num_to_draft > 0 and row.start - row.draft_start > 1
            seen["all" if num_accepted == num_drafts else "some" if num_accepted else "none"] += 1
            size = self.cache.block_size
            seen["new block"] += row.start // size != (row.start + row.num_tokens - 1) // size
            seen["many"] += num_drafts > 5
            seen["last"] += row.start + row.num_tokens == entry.request.num_needed
            seen["hit"] += entry.request.cached > 0
            seen["grammar"] += bool(entry.request.params.grammar)
            seen["tenants"] += not self._shares.has_one_tenant
            seen["target"] += entry.request.scheduling.has_target
            seen["windows"] += self.cache.has_windows
        apply_row(self, entry, row, result)

    monkeypatch.setattr(Scheduler, "_apply_row", noted)
    for seed in range(120):
        run_with_drafts(seed)

    rare = {what: seen[what] for what in seen if seen[what] < 5}
    assert len(seen) == 13 and not rare, rare


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
