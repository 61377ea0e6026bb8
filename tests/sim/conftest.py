"""Sets how many seeds the simulation runs: 80, 1,000,000 with `--long`, or as `--sim-seeds` and `--sim-seed` say."""

from __future__ import annotations

import pytest

SHORT_SEEDS = 80
MUTANT_SEEDS = 300
"""Seeds that a planted bug may need."""
LONG_SEEDS = 1_000_000
_SHORT_CHUNK, _LONG_CHUNK = 20, 500
"""Seeds of one test: it takes some seconds in a short run, and up to a minute in a long one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--sim-seeds", type=int, metavar="N", help="run seeds 0 to N - 1")
    group.addoption("--sim-seed", type=int, metavar="SEED", help="run this seed alone")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        chunks = _chunks(metafunc.config)
        metafunc.parametrize("seeds", chunks, ids=[f"{chunk.start}-{chunk.stop - 1}" for chunk in chunks])


def _chunks(config: pytest.Config) -> list[range]:
    """The seeds in ranges, one test each, so that several processes share them."""
    alone = config.getoption("--sim-seed", default=None)
    if alone is not None:
        return [range(alone, alone + 1)]
    num_seeds = config.getoption("--sim-seeds", default=None)
    if num_seeds is None:
        num_seeds = LONG_SEEDS if config.getoption("--long", default=False) else SHORT_SEEDS
    size = _SHORT_CHUNK if num_seeds <= 20 * SHORT_SEEDS else _LONG_CHUNK
    return [range(first, min(first + size, num_seeds)) for first in range(0, num_seeds, size)]
