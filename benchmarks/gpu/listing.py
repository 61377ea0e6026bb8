"""Every point of parts without measurements: the empty form of their tables.

python -m benchmarks.gpu.listing FILE PART ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.catalogue import rows
from benchmarks.gpu.child import run
from benchmarks.gpu.points import Point
from benchmarks.gpu.report import NOT_MEASURED
from benchmarks.gpu.runner import Result, Row


def listed(row: Row) -> Result:
    """The row's points without data that only a device can give."""
    points: list[Point] = []
    run(Bench("cpu", points.append, is_listing=True), row.target, dict(row.arguments))
    return Result(row.key, "skipped", 0.0, "", tuple(points), NOT_MEASURED)


def main(arguments: Sequence[str]) -> int:
    into, *parts = arguments
    results = [listed(row) for part in parts for row in rows(part)]
    Path(into).write_text("".join(json.dumps(result.as_json()) + "\n" for result in results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
