"""A row's process: calls the row's function and writes each point to a file at once, then the files that it ran.

A row that lacks a package fails, so that nobody takes it for one that ran.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, CannotRunError
from benchmarks.gpu.points import Point
from benchmarks.gpu.runner import SKIPPED
from benchmarks.gpu.tree import ROOT, SOURCES


def target_of(name: str) -> Callable[..., None]:
    """The function named by `module:function` of this package."""
    module, _, function = name.partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("asked", type=json.loads)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    with options.into.open("w") as file:

        def write(value: dict[str, Any]) -> None:
            file.write(json.dumps(value) + "\n")
            file.flush()

        def emit(point: Point) -> None:
            print(point.case.table, dict(point.case.labels), point.trial, flush=True)
            write(point.as_json())

        asked = options.asked
        bench = Bench(asked["device"], emit, is_rehearsal=options.rehearse)
        try:
            run(bench, asked["target"], asked["arguments"])
        except CannotRunError as error:
            write({"skipped": str(error)})
            return SKIPPED
        write({"files": imported_files()})
    return 0


def imported_files() -> list[str]:
    """Files of the checkout that this process has imported, relative to it, in order."""
    names = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = {Path(name).resolve() for name in names if name}
    return sorted(str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT) and _is_source(path))


def _is_source(path: Path) -> bool:
    """Whether it is ours: installed packages may lie within the checkout as well."""
    return path.relative_to(ROOT).parts[0] in SOURCES


def run(bench: Bench, target: str, arguments: dict[str, Any]) -> None:
    """Run with the same random numbers every time. float32 products use float32, because comparisons depend on it."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        target_of(target)(bench, **arguments)


if __name__ == "__main__":
    sys.exit(main())
