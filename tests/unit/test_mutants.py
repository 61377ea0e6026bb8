"""The mutation driver: the tests it runs for a file, and that it tells a caught mutant from a surviving one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import run as mutants

WAITING_QUEUE = mutants.ROOT / "engine" / "sched" / "fairness" / "queue.py"

JUDGE = """
import json, sys
from pathlib import Path
from tests.mutants.run import Mutant, judge
path = Path(sys.argv[1])
source = path.read_text()
changed = [(source, "nothing"), (source.replace("def ", "def un", 1), "a name"), ("raise OSError\\n", "all")]
outcomes, broken = judge([Mutant(path, 1, (name,), text) for text, name in changed], float(sys.argv[2]), 2)
assert not broken
print(json.dumps({mutant.diff[0]: outcome for mutant, outcome in outcomes}))
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("engine/sched/fairness/heap.py", "test_heap"),
        ("server/dispatch/router.py", "test_router"),
        ("server/generate/choice.py", "test_results"),
    ],
)
def test_the_tests_of_a_file_are_those_that_import_it(name: str, expected: str) -> None:
    assert expected in [test.stem for test in mutants.tests_of(mutants.ROOT / name)]


def test_every_target_has_tests() -> None:
    files = [path for pattern in mutants.TARGETS for path in mutants.ROOT.glob(pattern)]
    assert len(files) > 30
    assert [path for path in files if path.stat().st_size and not mutants.tests_of(path)] == []


@pytest.mark.parametrize(
    ("limit_s", "expected"), [(300, {"nothing": "survived", "a name": "killed", "all": "killed"}), (0, {})]
)
def test_a_mistake_that_tests_see_is_killed_and_another_survives(limit_s: int, expected: dict[str, str]) -> None:
    """Without time no mutant is begun, and none is reported as broken."""
    command = [sys.executable, "-c", JUDGE, str(WAITING_QUEUE), str(limit_s)]
    done = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_the_report_says_the_score_and_the_survivors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "HOME", tmp_path)
    monkeypatch.setattr(mutants, "ROOT", tmp_path.parent)
    seen = [mutants.Mutant(tmp_path / "a.py", line, (f"-{line}", "+0"), "") for line in (1, 2, 3)]
    mutants._report(list(zip(seen, ("killed", "survived", "too long"), strict=True)), "7", 9)
    report = (tmp_path / "report.md").read_text()
    assert "3 of 9 mutants, seed 7" in report and f"| {tmp_path.name}/a.py | 3 | 2 | 1 | 67% |" in report
    assert "a.py:2" in report and "a.py:1" not in report and "a.py:3" not in report
