"""Forms compiled for an AMD GPU: each gives a row, and a form that could not be launched has a fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.aot.compiling import run

pytest.importorskip("triton")

PLANTED = """
import json
from dataclasses import asdict, replace
from inferd.kernels.compile import amd

forms = amd.forms()
# It multiplies on the matrix units, and its loop has several stages.
fits = next(form for form in forms if form.op == "linear_few_rows" and form.config.startswith("bf16 tile 16"))
# Its op states the shared memory, which is what lets it have fewer stages.
fitted = next(form for form in forms if form.op == "paged_attention" and form.shared is not None)
inputs = fits.constants["BLOCK_K"]

def changed(**constants):
    return replace(fits, constants={**fits.constants, **constants}, shared=None)

planted = {
    "fits": fits,
    "columns": changed(ROWS=8),
    "registers": changed(ROWS=8, BLOCK_N=16, BLOCK_K=4 * inputs),
    "memory": replace(fitted, shared=None, num_stages=6),
    "broken": changed(BLOCK_K=100),
}
rows = {name: amd.compiled(form, "gfx942") for name, form in planted.items()}
print(json.dumps([{name: asdict(row) for name, row in rows.items()}, amd.render([rows["broken"], rows["fits"]])]))
"""


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, dict[str, Any]], str]:
    """(row by name, the table of two rows)."""
    code, output, errors = run(program=f"-c {PLANTED}")
    assert code == 0, errors[-2000:]
    rows, table = json.loads(output.splitlines()[-1])
    return rows, table


def test_each_fault_is_found_and_a_form_that_fits_has_none(found: tuple[dict[str, dict[str, Any]], str]) -> None:
    rows, _ = found
    fits = rows["fits"]
    assert (fits["op"], fits["arch"], fits["faults"], fits["spills"]) == ("linear_few_rows", "gfx942", [], 0)
    assert 0 < fits["registers"] <= 512 and 0 < fits["shared_bytes"] <= 65536 and fits["matrix"] > 0
    assert rows["columns"]["faults"] == ["multiplies without matrix instructions"]
    assert f"spills {rows['registers']['spills']} registers" in rows["registers"]["faults"]
    memory = rows["memory"]
    assert f"needs {memory['shared_bytes']:,} of 65,536 bytes of shared memory" in memory["faults"]


def test_a_form_that_does_not_compile_is_a_row_too(found: tuple[dict[str, dict[str, Any]], str]) -> None:
    rows, table = found
    assert rows["broken"]["faults"][0].startswith("does not compile: ") and rows["broken"]["registers"] == 0
    assert table.split()[:6] == ["linear_few_rows", "2", "forms,", "1", "with", "faults;"]
