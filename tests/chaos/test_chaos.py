"""Small runs of chaos and soak, started as a person starts them: both end with code 0 and a report. The long runs are
`make chaos` and `make soak`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
SEED = 3
"""A seed whose first fault kills an engine."""


def start(program: str, out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"tests.chaos.{program}", "--out", str(out), *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def ended(process: subprocess.Popen[str]) -> str:
    """The output of a program, which must end with code 0."""
    printed, _ = process.communicate(timeout=280)
    assert process.returncode == 0, printed
    return printed


def test_chaos_and_soak_run_small(tmp_path: Path) -> None:
    """Both at once: each waits for a server to start, and chaos for another engine."""
    soak = start("soak", tmp_path, "--hours", "0.0003", "--rate", "4", "--rest-every-s", "0.4", "--sample-every-s", "1")
    chaos = start("chaos", tmp_path, "--minutes", "0.02", "--requests", "8", "--clients", "4", "--seed", str(SEED))
    printed = ended(chaos)
    found = re.search(r"\*\*(\d+) requests, 0 wrong\.\*\* (\d+) answers were compared", printed)
    assert found is not None and int(found[2]) > 0, printed
    assert re.search(r"engine killed \(SIGKILL\) +\| +[1-9]\d* \| +[1-9]", printed), printed
    assert "SIGTERM under load: exit code 0" in printed
    assert "Nothing was measured" not in ended(soak)
    report = (tmp_path / "soak.md").read_text()
    assert "KV blocks held then: none" in report and " 0 violations" in report
    assert "not decided" in report and "held |" not in report, "seconds decide nothing about an hour"
    for name in ("soak.svg", "soak_handles.svg", "chaos.svg", "chaos_recovery.svg"):
        assert ElementTree.fromstring((tmp_path / name).read_text()).tag.endswith("svg")
