"""The benchmark of the host's time runs a small model, and sees that a recorded step makes few launches."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytest.importorskip("triton")
pytestmark = pytest.mark.recorded("models")


def table_of(*arguments: str) -> list[list[str]]:
    """The rows of the table that the benchmark prints for the small model."""
    line = [sys.executable, "-m", "benchmarks.host_time", "--model", "smoke", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]]


def test_a_recorded_step_launches_its_head_and_its_draw_alone() -> None:
    table = table_of("--decodes", "3", "--prompt", "20", "--seconds", "0.05")
    launches = {name: float(count) for name, count, *_ in table}
    assert launches["recorded layers"] < 8 < 16 < launches["call by call"]


def test_launches_of_a_layer_are_counted() -> None:
    """Few rows: four products, fused with norms, activation and additions, the rotation, two of attention."""
    launches = {name: (float(few), float(many)) for name, few, many in table_of("--launches")}
    assert launches["few_rows early"] == (4, 0) and launches["products of torch"] == (0, 4)
    assert {launches[f"{name} early"] for name in ("rope_and_cache", "attend_parts", "combine")} == {(1, 1)}
    assert launches["rms_norm early"] == (0, 2)
    assert launches["all"] == (7, 10)
