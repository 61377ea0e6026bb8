"""The benchmark of the host's time runs a small model, and sees that a recorded step makes few launches."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytest.importorskip("triton")


def test_a_recorded_step_launches_its_head_and_its_draw_alone() -> None:
    line = [sys.executable, "-m", "benchmarks.host_time", "--model", "smoke", "--decodes", "3", "--prompt", "20"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*line, "--seconds", "0.05"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    table = [[cell.strip() for cell in row.split("|")[1:-1]] for row in done.stdout.splitlines() if row.startswith("|")]
    launches = {name: float(count) for name, count, *_ in table[2:]}
    assert launches["recorded layers"] < 8 < 16 < launches["call by call"]
