"""What every tier shares: `--long`, and sampling of large parameter sets by a seed drawn from the commit."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CACHE_HOME = ROOT / "build" / "cache"
KERNEL_CACHE = CACHE_HOME / "inferd" / "kernels"
"""Where tests, and the servers that they start, keep the compiled C++ kernels: built once for all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run every case of every test")
    parser.addoption(
        "--kernels", choices=("cpp", "reference"), default="cpp", help="what computes in tests/cpu (default: cpp)"
    )
    parser.addoption(
        "--device",
        choices=("cpu", "interpreter", "cuda"),
        default="cpu",
        help="tests/kernels: all kernels on the CPU, or those of Triton alone, interpreted or on a GPU (default: cpu)",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ["XDG_CACHE_HOME"] = str(CACHE_HOME)
    config.addinivalue_line(
        "markers", "sampled(keep): run `keep` of this test's cases, drawn by a seed from the commit; all with --long"
    )
    config.addinivalue_line("markers", "long: run with --long only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    dropped = {item for item in items if item.get_closest_marker("long")}
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            groups[item.nodeid.split("[")[0]].append(item)
    for name, group in groups.items():
        marker = group[0].get_closest_marker("sampled")
        assert marker is not None
        kept = random.Random(f"{_commit()} {name}").sample(group, min(len(group), marker.kwargs["keep"]))
        dropped.update(set(group) - set(kept))
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def _commit() -> str:
    if shutil.which("git") is None:
        return "no commit"
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "no commit"
