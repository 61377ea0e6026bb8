"""Every Triton kernel compiles for every architecture without a GPU, and the committed table holds the results.

`--long` compiles every form. Otherwise one form of each kernel is compiled for one architecture, and all forms that
differ from the table.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

from inferd.kernels.compile import aot, compiled, faults
from inferd.kernels.device import SHARED_BYTES
from tests.aot.compiling import TIMEOUT_S, run
from tests.conftest import ROOT

TABLE = ROOT / "benchmarks" / "results" / "compiled.json"
OLDEST = TABLE.with_name("compiled_oldest.json")
"""The same forms, compiled by the oldest Triton that is supported."""
ANEW = (
    f"not what {TABLE.relative_to(ROOT)} says: python -m inferd.kernels.compile.aot --write {TABLE.relative_to(ROOT)}"
)

pytest.importorskip("triton")


@pytest.mark.sampled(keep=2, among="long checks of all kernels")
@pytest.mark.recorded("kernels", keep=0)
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
    assert {row.sm for row in rows} == set(SHARED_BYTES)
    for path in (ROOT / "kernels" / "ops").glob("*/triton.py"):
        assert list(importlib.import_module(f"inferd.kernels.ops.{path.parent.name}.triton").shipped()), path
    assert {row.op for row in rows} == {form.op for form in aot.all_shipped()}
    if table.triton == compiled.triton_version():
        listed = set(map(repr, table.rows))
        assert [(row.op, row.config, row.sm) for row in rows if repr(row) not in listed] == [], ANEW
        assert not is_long or rows == table.rows, ANEW


def test_the_table_has_exactly_the_shipped_forms() -> None:
    shipped = [(form.op, form.config, sm) for form in aot.all_shipped() for sm in aot.targets(form)]
    assert [(row.op, row.config, row.sm) for row in compiled.read_table(TABLE).rows] == shipped, ANEW
    assert not [row for row in compiled.read_table(TABLE).rows if row.faults]


def test_every_known_fault_is_one_of_the_tables() -> None:
    for known in faults.KNOWN:
        rows = compiled.read_table(OLDEST if known.triton else TABLE).rows
        accepted = [(row.op, fault) for row in rows for fault in row.accepted]
        assert any(op == known.op and fault.endswith(f": {known.reason}") for op, fault in accepted), known
    assert {known.triton for known in faults.KNOWN if known not in faults.known_by("3.7.1")} == {"3.6."}


def test_the_oldest_triton_gave_code_without_faults(is_long: bool) -> None:
    """Compiling by it takes another package and minutes, so only `--long` wants the table to be of today's forms."""
    table = compiled.read_table(OLDEST)
    (least,) = re.findall(r'"triton>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert f"{table.triton}.".startswith(f"{least}.") and len(table.rows) > 1800
    assert not [row for row in table.rows if row.faults]
    if is_long:
        made, today = ([(row.op, row.config, row.sm, row.source) for row in compiled.read_table(path).rows]
                       for path in (OLDEST, TABLE))  # fmt: skip
        assert made == today, f"python -m inferd.kernels.compile.aot --triton=FOLDER --write {OLDEST}"
