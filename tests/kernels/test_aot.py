"""Every Triton kernel compiles for every architecture without a GPU, and the judge sees what is wrong.

A process of its own compiles: in this one Triton interprets. `--long` compiles every form and refuses a committed table
that is not what came out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inferd.kernels import aot
from tests.conftest import CACHE_HOME, ROOT

TIMEOUT_S = 1200
TABLE = ROOT / "benchmarks" / "results" / "compiled.json"

pytest.importorskip("triton")


def run(*arguments: str, program: str = "-m inferd.kernels.aot") -> tuple[int, str, str]:
    """(exit code, output, errors). Killed with all its children in the end: an assembler can run for an hour."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(CACHE_HOME / "triton")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-P", *program.split(" ", 1), *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, output, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_every_form_compiles_without_faults(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    is_long = request.config.getoption("--long")
    written = tmp_path / "compiled.json"
    code, output, errors = run("--write", str(written), *(() if is_long else ("--one-each", "--since", str(TABLE))))
    assert code == 0, output[-4000:] + errors[-2000:]
    rows = aot.read_table(written)
    assert {row.sm for row in rows} == {80, 90, 100}
    ops = {path.parent.name for path in (ROOT / "kernels").glob("*/triton.py")}
    assert len({row.op for row in rows}) >= len(ops)
    if is_long:
        listed = {(row.op, row.config, row.sm, row.source) for row in aot.read_table(TABLE)}
        assert listed == {(row.op, row.config, row.sm, row.source) for row in rows}, f"write {TABLE} anew"


SPILLING = """
import sys
import triton, triton.language as tl
from inferd.kernels.aot import compile_form, render
from inferd.kernels.gpu import Shipped

@triton.jit
def kernel(x, out, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    values = tl.load(x + column)
    tl.store(out + column, values * tl.sum(values))

form = Shipped("sum", "one warp", kernel, {"x": "*fp32", "out": "*fp32"}, {"BLOCK": 16384}, 1, is_matrix=True)
print(*compile_form(form, 90).faults, sep="; ")
"""


def test_faults_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "spilling.py"
    path.write_text(SPILLING)
    code, output, errors = run(program=str(path))
    assert code == 0, errors[-2000:]
    assert "spills: " in output
    assert "multiplies without HGMMA or QGMMA or IGMMA" in output


def test_what_is_compiled_again() -> None:
    class Kernel:
        def __init__(self, source: str) -> None:
            self.cache_key = source

    def form(op: str, config: str, source: str) -> aot.Shipped:
        return aot.Shipped(op, config, Kernel(source), {}, {}, 1)

    forms = [form("a", "1", "x"), form("a", "2", "x"), form("b", "1", "y"), form("b", "2", "y")]
    row = aot.Row("a", "1", 90, 0, 0, 0, 0, 0, "", "x", ())
    assert aot.chosen(forms, [row], one_each=False) == [0, 1, 2, 3]
    assert aot.chosen(forms, [row], one_each=True) == [0, 2, 3]


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert aot.read_table(tmp_path / "none.json") == []
    row = aot.Row("a", "1", 90, 1, 2, 3, 4, 5, "HGMMA", "x", ("a fault",))
    path = tmp_path / "table.json"
    path.write_text(json.dumps([aot.asdict(row)]))
    assert aot.read_table(path) == [row]
    assert "FAULT a fault" in aot.render([row])
