"""Run every test tier in turn, each with a time budget, and print what each took.

A tier is a set of folders or files under `tests/`. A tier over its budget is marked in the report, but does not fail:
sample its large parameter sets then (`@pytest.mark.sampled`). `--long` runs all cases. `--quick` runs one tier
alone, which finds most mistakes soonest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Tier:
    name: str
    budget_s: int
    folders: tuple[str, ...]
    workers: int = 0
    """pytest-xdist processes; 0: none."""
    threads: int = 2
    """Threads of each process's numeric libraries."""
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
    Tier("arch + unit", 85, ("arch", "unit"), workers=2, threads=1),
    Tier("simulation + property + chaos", 75, ("sim", "property", "chaos"), workers=2, threads=1),
    Tier("cpu models + aot", 115, ("cpu", "aot"), workers=2, threads=1),
    Tier("cpu models in plain PyTorch", 600, ("cpu",), options=("--kernels", "reference"), is_long=True),
    Tier("kernels", 120, ("kernels",), workers=2, threads=1),
    Tier(
        "api + page + deploy + benchmarks",
        85,
        ("api", "page", "deploy", "benchmarks"),
        workers=2,
        threads=1,
        options=("-rs",),
    ),
    Tier("real model", 40, ("real",), workers=2, threads=1, by="loadfile"),
    Tier("e2e", 80, ("e2e", "prometheus"), workers=2, threads=1, by="loadfile", options=("-rs",)),
    # There are more processes than cores, because waiting for a daemon takes no processor time. Engines with two
    # threads each would compete for the cores.
    Tier("reliability", 120, ("reliability",), workers=4, threads=1, engine_threads=1, by="loadfile"),
    Tier("security", 80, ("security",), workers=3, threads=1, engine_threads=1, by="loadfile"),
    Tier("schemathesis", 600, ("clients",), is_long=True, program=("tests/clients/run.py", "--only", "schemathesis")),
)
QUICK = Tier(
    "quick", 90,
    ("arch", "unit", "api/test_chat.py", "api/test_routes.py", "api/test_error_table.py", "e2e/test_serve.py",
     "e2e/test_client.py"),
    workers=2, threads=1, by="loadfile",
)  # fmt: skip
MUTANTS = ("-m", "tests.mutants.run", "--most", "2000", "--minutes", "60")
MUTANTS_BUDGET_S = 4000
"""With `--long` only. This reports the mutants that survive, and fails only if it could judge none."""
INSTALL_BUDGET_S = 90
KEEPS_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
"""Otherwise every process would compile its tests anew, and every daemon the server."""


def main() -> int:
    options = _options()
    rows: list[tuple[str, int, float, int]] = []
    if options.make:
        started = time.monotonic()
        code = subprocess.run(
            [*options.make.split(), "--no-print-directory", "install"], cwd=ROOT, check=False
        ).returncode
        rows.append(("install", INSTALL_BUDGET_S, time.monotonic() - started, code))
        if code:
            return _report(rows)
    for tier in (QUICK,) if options.quick else TIERS:
        folders = [f"tests/{folder}" for folder in tier.folders if (ROOT / "tests" / folder).exists()]
        if not folders or (options.only and tier.name not in options.only) or (tier.is_long and not options.long):
            continue
        print(f"\n== {tier.name} (budget {tier.budget_s} s)", flush=True)
        started = time.monotonic()
        rows.append((tier.name, tier.budget_s, 0.0, _run(tier, folders, options)))
        rows[-1] = (*rows[-1][:2], time.monotonic() - started, rows[-1][3])
    if options.long and not options.only:
        print(f"\n== mutants (budget {MUTANTS_BUDGET_S} s)", flush=True)
        started = time.monotonic()
        code = subprocess.run([options.python, *MUTANTS], cwd=ROOT, check=False).returncode
        rows.append(("mutants", MUTANTS_BUDGET_S, time.monotonic() - started, code))
    return _report(rows)


def _run(tier: Tier, folders: list[str], options: argparse.Namespace) -> int:
    command = [options.python, "-m", "pytest", "-q", *folders, *tier.options]
    if tier.program:
        return subprocess.run([options.python, *tier.program], cwd=ROOT, check=False).returncode
    if tier.workers:
        # Files in the order of `conftest.LONGEST_FIRST`, and not by how many tests they hold.
        command += ["-n", str(tier.workers), "--dist", tier.by, "--no-loadscope-reorder"]
    if options.long:
        command += ["--long"]
    count = str(tier.threads)
    threads = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "OMP_WAIT_POLICY": "passive"}
    if tier.engine_threads and not options.long:
        threads["INFERD_NUM_THREADS"] = str(tier.engine_threads)
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **threads, **KEEPS_BYTECODE}, check=False).returncode


def _report(rows: list[tuple[str, int, float, int]]) -> int:
    print("\ntier                            seconds   budget")
    for name, budget_s, took_s, code in rows:
        marks = ("  FAILED" if code else "") + ("  over budget" if took_s > budget_s else "")
        print(f"{name:30} {took_s:8.1f} {budget_s:8}{marks}")
    print(f"{'all':30} {sum(row[2] for row in rows):8.1f} {sum(row[1] for row in rows):8}")
    return int(any(code for *_, code in rows))


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
