"""Every test is in one tier of `make test`, and a failure of any lane is one of the whole."""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiers
from tests.tiers import QUICK, ROOT, SLOWEST_UNITS, TIERS, Tier

LONG_ALONE = {"clients", "ray"}
"""Folders that need more than `make install`."""


def test_every_folder_with_tests_is_in_one_tier() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    counts = Counter(folder for tier in TIERS if not tier.is_long for folder in tier.folders)
    assert folders - LONG_ALONE == set(counts) and set(counts.values()) == {1}


def test_what_the_quick_tier_names_is_there() -> None:
    named = [*QUICK.folders, *(f"unit/test_{name}.py" for name in SLOWEST_UNITS)]
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    folder = ROOT / "build" / "tiers" / tmp_path.name
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("failing", ["", "one", "two", "three"])
def test_lanes_run_beside_each_other_and_any_failure_counts(
    failing: str, logs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiers are shell commands. One of each lane waits for a file that the other makes."""
    meets = 'touch {0}; for _ in $(seq 500); do test -e {1} && break; sleep 0.01; done; test -e {1} && echo "met {0}"'
    files = f"{tmp_path}/a", f"{tmp_path}/b"
    scripts = {"one": meets.format(*files), "two": meets.format(*reversed(files)), "three": "echo third"}
    if failing:
        scripts[failing] += "; exit 3"
    lanes = {"one": "computes", "two": "waits", "three": "waits"}
    monkeypatch.setattr(tiers, "TIERS", [Tier(name, 10, ("unit",), lane=lane) for name, lane in lanes.items()])
    monkeypatch.setattr(tiers, "LOGS", logs)
    monkeypatch.setattr(tiers, "_command", lambda tier, _: ["sh", "-c", scripts[tier.name]])
    monkeypatch.setattr(
        tiers, "_options",
        lambda: argparse.Namespace(python="true", make=None, long=False, quick=False, only=None),
    )  # fmt: skip
    assert tiers.main() == int(bool(failing))
    told = capsys.readouterr().out
    assert all(words in told for words in (f"met {files[0]}", f"met {files[1]}", "third"))
    failed = [line.split()[0] for line in told.splitlines() if "FAILED" in line]
    assert failed == [failing] * bool(failing)


def test_a_lane_without_tiers_takes_the_last_of_the_other() -> None:
    lanes = {"first": "computes", "second": "computes", "third": "computes", "daemons": "waits"}
    waiting = tiers.Waiting(Tier(name, 10, ("unit",), lane=lane) for name, lane in lanes.items())
    taken = [waiting.next(lane) for lane in ("computes", "waits", "waits", "computes", "waits", "computes")]
    assert [tier and tier.name for tier in taken] == ["first", "daemons", "third", "second", None, None]
