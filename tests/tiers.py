"""Run every test tier, each with a budget of processor time, and print what each took.

A tier is a set of folders or files under `tests/`, and one run of pytest. The tiers of a lane run in turn. The lanes
run beside each other: one computes while the other waits for daemons. A lane that has run its tiers takes the last one
that waits in the other. A tier over its budget is marked in the report,
but does not fail: sample its large parameter sets then (`@pytest.mark.sampled`). Budgets are of processor time, because
other programs of the machine hardly change it. `--long` runs all cases, one tier at a time. `--quick` runs one tier
alone, which finds most mistakes soonest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[1]
CACHE_HOME = ROOT / "build" / "cache"
"""XDG_CACHE_HOME of all tests and of the servers that they start."""
LOGS = ROOT / "build" / "tiers"
"""The output of each tier, while lanes run beside each other. It is printed when the tier ends."""


@dataclass(frozen=True, slots=True)
class Tier:
    name: str
    budget_s: int
    """Processor time of the tier and all of its processes."""
    folders: tuple[str, ...]
    lane: str = "computes"
    workers: int = 2
    """pytest-xdist processes; 0: none."""
    engine_threads: int | None = None
    """Threads of each daemon's engine, except with `--long`. None: one per core."""
    by: str = "worksteal"
    """Distribution of pytest-xdist. "worksteal" gives each process a share, and idle processes take tests from others.
    "loadfile" keeps a file's tests, and the daemons that they share, in one process."""
    options: tuple[str, ...] = ()
    is_long: bool = False
    """Run with `--long` only."""
    program: tuple[str, ...] = ()
    """Run in place of pytest."""


TIERS = (
    Tier("arch + unit + simulation", 300, ("arch", "unit", "sim", "property", "chaos")),
    Tier("cpu models", 190, ("cpu",)),
    Tier("cpu models in plain PyTorch", 1200, ("cpu",), workers=0, options=("--kernels", "reference"), is_long=True),
    Tier("kernels + aot", 110, ("kernels", "aot")),
    Tier("api + page + deploy + benchmarks", 180, ("api", "page", "deploy", "benchmarks"), options=("-rs",)),
    Tier(
        "real model + e2e", 200, ("real", "real_models", "e2e", "prometheus"), lane="waits", by="loadfile",
        options=("-rs",),
    ),
    # Engines with two threads each would compete for the cores.
    Tier(
        "reliability + security", 300, ("reliability", "security"), lane="waits", workers=3, engine_threads=1,
        by="loadfile",
    ),
    Tier(
        "schemathesis", 1200, ("clients",), workers=0, is_long=True,
        program=("tests/clients/run.py", "--only", "schemathesis"),
    ),
)  # fmt: skip
SLOWEST_UNITS = (
    "checker", "control_tokens", "derived_formats", "fair", "mutants", "plan_command", "private_names", "quoted",
    "render_workers", "schema_numbers", "split_points",
)  # fmt: skip
"""Files of unit tests that `--quick` leaves out. They take a third of the processor time of all."""
QUICK = Tier(
    "quick", 160,
    ("arch", "unit", "api/test_chat.py", "api/test_routes.py", "api/test_error_table.py", "e2e/test_serve.py",
     "e2e/test_client.py"),
    by="loadfile",
    options=tuple(f"--ignore=tests/unit/test_{name}.py" for name in SLOWEST_UNITS),
)  # fmt: skip
MUTANTS = ("-m", "tests.mutants.run", "--most", "2000", "--minutes", "60")
MUTANTS_BUDGET_S = 8000
"""With `--long` only. This reports the mutants that survive, and fails only if it could judge none."""
INSTALL_BUDGET_S = 90
KERNELS = ("-m", "inferd.kernels.cpu.library", "--here")
KERNELS_BUDGET_S = 120
"""The C++ kernels are compiled before any lane starts. Beside two lanes that takes minutes, and the servers of some
tests would not be ready in time."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    # Otherwise every process would compile its tests anew, and every daemon the server.
    "PYTHONDONTWRITEBYTECODE": "",
    "XDG_CACHE_HOME": str(CACHE_HOME),
}
PRINTING = Lock()


@dataclass(frozen=True, slots=True)
class Took:
    """One line of the report."""

    name: str
    budget_s: int
    wall_s: float
    processor_s: float
    code: int


class Waiting:
    """Tiers that have not started."""

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._of_lane: dict[str, deque[Tier]] = {}
        for tier in tiers:
            self._of_lane.setdefault(tier.lane, deque()).append(tier)
        self._taking = Lock()

    def next(self, lane: str) -> Tier | None:
        """The next tier of this lane, or else the last one of the lane in which most wait. Otherwise one core would be
        idle at the end."""
        with self._taking:
            if self._of_lane[lane]:
                return self._of_lane[lane].popleft()
            others = max(self._of_lane.values(), key=len)
            return others.pop() if others else None


def main() -> int:
    options = _options()
    started_s, rows = time.monotonic(), list[Took]()
    if options.make:
        rows.append(_timed("install", INSTALL_BUDGET_S, [*options.make.split(), "--no-print-directory", "install"], {}))
        if rows[-1].code:
            return _report(rows, started_s)
    rows.append(_timed("kernels compiled", KERNELS_BUDGET_S, [options.python, *KERNELS], {}))
    chosen = [QUICK] if options.quick else [tier for tier in TIERS if _is_chosen(tier, options)]
    if options.long or len({tier.lane for tier in chosen}) < 2:
        rows += _lane(chosen, options, None)
    else:
        LOGS.mkdir(parents=True, exist_ok=True)
        waiting, lanes = Waiting(chosen), sorted({tier.lane for tier in chosen})
        with ThreadPoolExecutor(len(lanes)) as pool:
            for found in pool.map(lambda lane: _lane(iter(partial(waiting.next, lane), None), options, LOGS), lanes):
                rows += found
    if options.long and not options.only:
        print(f"\n== mutants (budget {MUTANTS_BUDGET_S} s)", flush=True)
        rows.append(_timed("mutants", MUTANTS_BUDGET_S, [options.python, *MUTANTS], {}))
    return _report(rows, started_s)


def _is_chosen(tier: Tier, options: argparse.Namespace) -> bool:
    return bool(_folders(tier)) and (not options.only or tier.name in options.only) and options.long >= tier.is_long


def _folders(tier: Tier) -> list[str]:
    return [f"tests/{folder}" for folder in tier.folders if (ROOT / "tests" / folder).exists()]


def _lane(tiers: Iterable[Tier], options: argparse.Namespace, logs: Path | None) -> list[Took]:
    """Run the tiers in turn. With a folder for logs, the output of each is printed as a whole, and not mixed with that
    of other lanes."""
    rows = []
    for tier in tiers:
        heading = f"== {tier.name} (budget {tier.budget_s} s of processor time)"
        log = logs / f"{tier.name.replace(' + ', '-').replace(' ', '-')}.log" if logs else None
        with PRINTING:
            print(f"\n{heading}" + (f" has started: {log.relative_to(ROOT)}" if log else ""), flush=True)
        threads = {"INFERD_NUM_THREADS": str(tier.engine_threads)} if tier.engine_threads and not options.long else {}
        rows.append(_timed(tier.name, tier.budget_s, _command(tier, options), threads, log))
        if log:
            with PRINTING:
                print(f"\n{heading}\n{log.read_text(errors='replace')}", flush=True)
    return rows


def _command(tier: Tier, options: argparse.Namespace) -> list[str]:
    if tier.program:
        return [options.python, *tier.program]
    command = [options.python, "-m", "pytest", "-q", *_folders(tier), *tier.options]
    if tier.workers:
        # Files in the order of `conftest.LONGEST_FIRST`, and not by how many tests they hold.
        command += ["-n", str(tier.workers), "--dist", tier.by, "--no-loadscope-reorder"]
    return [*command, "--long"] if options.long else command


def _timed(name: str, budget_s: int, command: list[str], more: dict[str, str], log: Path | None = None) -> Took:
    started_s = time.monotonic()
    output = log.open("wb") if log else None
    try:
        environment = {**os.environ, **(ENVIRONMENT if name != "install" else {}), **more}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
    finally:
        if output:
            output.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.monotonic() - started_s
    return Took(name, budget_s, wall_s, used.ru_utime + used.ru_stime, process.returncode)


def _report(rows: Sequence[Took], started_s: float) -> int:
    print(f"\n{'tier':34}  seconds  processor s  budget")
    for row in rows:
        marks = ("  FAILED" if row.code else "") + ("  over budget" if row.processor_s > row.budget_s else "")
        print(f"{row.name:34} {row.wall_s:8.1f} {row.processor_s:12.1f} {row.budget_s:7}{marks}")
    processor_s, budget_s = sum(row.processor_s for row in rows), sum(row.budget_s for row in rows)
    print(f"{'all':34} {time.monotonic() - started_s:8.1f} {processor_s:12.1f} {budget_s:7}")
    return int(any(row.code for row in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--make", help="the make program: times `make install` as the first tier")
    parser.add_argument("--long", action="store_true", help="run all cases")
    parser.add_argument("--quick", action="store_true", help="run the quick tier alone")
    parser.add_argument("--only", action="append", help="a tier's name; may be given again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
