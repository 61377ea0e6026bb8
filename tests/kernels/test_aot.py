"""Every Triton kernel compiles for every architecture without a GPU, and the committed table holds the results.

`--long` compiles every form. Otherwise one form of each kernel is compiled for one architecture, and all forms that
differ from the table.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from inferd.kernels import aot, compiled, faults
from tests.aot.compiling import TIMEOUT_S, run
from tests.conftest import ROOT

TABLE = ROOT / "benchmarks" / "results" / "compiled.json"
ANEW = f"not what {TABLE.relative_to(ROOT)} says: python -m inferd.kernels.aot --write {TABLE.relative_to(ROOT)}"

pytest.importorskip("triton")


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_every_form_compiles_without_faults_to_what_the_table_says(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """All of a row is compared: tensor core instructions by kind and number, registers and memory. Another version of
    Triton gives other code, so then only faults count."""
    is_long = request.config.getoption("--long")
    written = tmp_path / "compiled.json"
    jobs = ["--jobs", str(min(2, os.cpu_count() or 1))]
    since = () if is_long else ("--one-each", "--since", str(TABLE))
    code, output, errors = run("--write", str(written), *jobs, *since)
    assert code == 0, output[-4000:] + errors[-2000:]
    rows, table = compiled.read_table(written).rows, compiled.read_table(TABLE)
    assert {row.sm for row in rows} == {80, 90, 100}
    for path in (ROOT / "kernels").glob("*/triton.py"):
        assert list(importlib.import_module(f"inferd.kernels.{path.parent.name}.triton").shipped()), path
    assert {row.op for row in rows} == {form.op for form in aot.all_shipped()}
    if table.triton == compiled.triton_version():
        listed = set(map(repr, table.rows))
        assert [(row.op, row.config, row.sm) for row in rows if repr(row) not in listed] == [], ANEW
        assert not is_long or rows == table.rows, ANEW


def test_the_table_has_exactly_the_shipped_forms() -> None:
    shipped = [(form.op, form.config, sm) for form in aot.all_shipped() for sm in aot.targets(form)]
    assert [(row.op, row.config, row.sm) for row in compiled.read_table(TABLE).rows] == shipped, ANEW
    assert not [row for row in compiled.read_table(TABLE).rows if row.faults]


def test_every_known_fault_is_one_of_the_table() -> None:
    accepted = [(row, fault) for row in compiled.read_table(TABLE).rows for fault in row.accepted]
    for known in faults.KNOWN:
        assert any(row.op == known.op and fault.endswith(f": {known.reason}") for row, fault in accepted), known
