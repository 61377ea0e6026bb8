"""Measure inferd on one CUDA GPU: `make gpu`, or `make gpu PART=checks`; `make gpu DRY=1` without a GPU.

    python -m benchmarks.gpu [--part first|headline|profile|peers|checks|kernels|engine] [--row REGEX] [--again]
        [--out DIR]

A row is one named measurement or check in a process of its own with a time limit. Each point is appended to
results.jsonl of --out within about a second. A second call runs the rows that are not yet right and those whose source
has changed; it finds earlier results in build/gpu too, so that --out may be a new folder. tables.md is written from all
results after each part. A point whose check failed has no speed.

The last lines name each row that is not right. A row fails if it lacks a package. It is skipped if it does not apply to
the device. The exit code is 0 if all rows are right or skipped, and 1 if one is not. It is 2 if nothing could run, and
3 if rows are left for the next call.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import dry, report
from benchmarks.gpu.catalogue import PARTS, USUAL, rows
from benchmarks.gpu.runner import WORK_DIR, Options, Result, Results, Row, run_rows
from benchmarks.gpu.tree import ROOT, environment, make_tree

_PROBE = """
import torch
if torch.cuda.is_available():
    print("device:", torch.cuda.get_device_name())
"""


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parse(arguments)
    selected = re.compile(asked.row)

    def is_asked(row: Row) -> bool:
        return bool(selected.search(row.key))

    device = None if asked.dry else "rehearsal" if asked.rehearse else device_name()
    options = Options(
        is_rehearsal=asked.rehearse,
        device="cpu" if asked.rehearse else "cuda",
        device_name=device or "",
        is_again=asked.again,
        until_s=time.monotonic() + asked.budget_s,
        jobs=asked.jobs,
    )
    if asked.dry:
        return dry.run(options, _say, is_asked)
    if device is None:
        _say("torch finds no GPU: --dry proves what can be proven without, --rehearse runs rows small on the CPU")
        return 2
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    out = asked.out or _default_out(slug, is_rehearsal=asked.rehearse)
    _say(f"results: {out.resolve()}")
    results = Results(out / "results.jsonl", WORK_DIR / slug / "results.jsonl")
    asked_rows = {part: list(filter(is_asked, rows(part))) for part in asked.part}
    if not any(asked_rows.values()):
        _say(f"no row of {', '.join(asked.part)} matches {asked.row!r}: names are in the column `row` of tables.md")
        return 2
    all_done: list[Result] = []
    all_left: list[Row] = []
    for part, part_rows in asked_rows.items():
        started_s = time.monotonic()
        done, left = run_rows(part_rows, results, options, _say)
        all_done += done
        all_left += left
        all_results = list(results.read().values())
        measured = not asked.rehearse
        (out / "tables.md").write_text(report.render(all_results, f"inferd on {device}", is_measured=measured))
        here = [result for result in all_results if result.key.startswith(f"{part}/")]
        print(report.render(here, f"{part} on {device}", is_measured=measured))
        over = f", {len(left)} left for the next call" if left else ""
        _say(f"{part}: {len(done)} rows in {time.monotonic() - started_s:.0f} s{over}")
    code, lines = report.verdict(all_done, all_left, results.lost(all_done))
    for line in (*lines, f"{out}: results.jsonl, tables.md"):
        _say(line)
    return code


def device_name() -> str | None:
    """The GPU's name, read in a separate process; None if torch finds none."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE], env=environment(make_tree()), capture_output=True, text=True, check=False
    )
    names = [line.removeprefix("device: ") for line in done.stdout.splitlines() if line.startswith("device: ")]
    return names[0] if names else None


def _default_out(slug: str, *, is_rehearsal: bool) -> Path:
    if is_rehearsal:
        return WORK_DIR / slug
    return ROOT / "benchmarks" / "results" / "gpu" / f"{slug}-{datetime.now(UTC):%Y-%m-%d}"


def _say(line: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {line}", file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        type=_parts,
        default=list(USUAL),
        metavar="PART",
        help=f"comma list of {', '.join(PARTS)}; {', '.join(USUAL)} if not given",
    )
    parser.add_argument("--row", default="", metavar="REGEX", help="run only rows whose part/name matches")
    parser.add_argument("--again", action="store_true", help="run rows that have a result again")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go; the first line names it")
    parser.add_argument(
        "--budget-s", type=float, default=500.0, help="no row starts after so many seconds; %(default)g if not given"
    )
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="checks that run side by side")
    parser.add_argument("--dry", action="store_true", help="run the checks that need no GPU")
    parser.add_argument("--rehearse", action="store_true", help="every row small on the CPU: shows that it runs")
    return parser.parse_args(arguments)


def _parts(text: str) -> list[str]:
    unknown = [name for name in text.split(",") if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
