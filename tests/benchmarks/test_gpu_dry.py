"""The dry run passes what is sound, and fails on each planted fault. `tests/aot/test_judge` plants kernels."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import dry
from benchmarks.gpu.points import Case, Point, Trial
from benchmarks.gpu.runner import Options, Row, child_command
from benchmarks.gpu.tree import ROOT, environment, make_tree


def compiled(op: str, faults: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "op": op, "config": "bf16", "sm": 90, "registers": 40, "stack_bytes": 0, "spills": 0, "shared_bytes": 1024,
        "wide_loads": 2, "loop_instructions": 90, "shared_per_global": 2.5, "matrix": {"HMMA.16816.F32": 8},
        "source": "x", "faults": list(faults), "accepted": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("max_err", "faults", "is_wrong"),
    [(0.001, [], False), (0.02, [], True), (math.nan, [], True), (0.001, ["spills"], True), (None, [], False)],
)
def test_a_dry_row_is_wrong_by_its_numbers_or_its_code(max_err: float, faults: list[str], is_wrong: bool) -> None:
    numerics = {"norm": {"max_err": max_err, "tol": 0.01, "reason": ""}}
    first, other = dry.join([compiled("norm", faults), compiled("rope")], numerics)
    assert first.is_wrong == is_wrong and not other.is_wrong
    assert (first.regs, first.smem, first.tensor_core, first.tol) == (40, 1024, "8 HMMA.16816.F32", 0.01)
    assert (first.loop, first.shared_per_global) == (90, 2.5)
    assert (other.max_err, other.reason) == (None, "no numeric check")


@pytest.mark.recorded("kernels")
def test_every_shipped_kernel_has_a_numeric_check_that_sees_a_wrong_one(tmp_path: Path) -> None:
    """In an interpreting process: the checks of two ops, one of them spoilt, and the names of all kernels."""
    code = """
import json, sys, torch
from benchmarks.gpu import numeric
from inferd.kernels import gpu
from inferd.kernels.ops.gelu import GELU
from inferd.kernels.registry import Implementation
from tests.kernels import interpreter
gpu.interpret(True)
interpreter.repair()
missing = [op for op, package in numeric.shipped_ops() if not numeric.check_of(op, package)]
right = numeric.check("gelu", torch.device("cpu"))
exact = Implementation("triton", torch.nn.functional.gelu, lambda key: None)
GELU._implementations = tuple(exact if one.name == "triton" else one for one in GELU._implementations)
wrong = numeric.check("gelu", torch.device("cpu"))
GELU._implementations = GELU._implementations[-1:]
absent = numeric.check("gelu", torch.device("cpu"))
numeric.CHECKS = {"gelu": numeric.CHECKS["gelu"]}
numeric.shipped_ops = lambda: []
numeric.main(["--out", sys.argv[1]])
try:
    numeric.main(["gelu"])
except SystemExit as ended:
    assert ended.code == 2
print(json.dumps([missing, right.is_wrong, right.max_err, wrong.max_err, absent.reason]))
"""
    env = {**environment(make_tree(tmp_path)), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-P", "-c", code, str(tmp_path / "out.json")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    missing, right_is_wrong, right, wrong, absent = json.loads(done.stdout.splitlines()[-1])
    assert list(json.loads((tmp_path / "out.json").read_text())) == ["gelu"]
    assert not (tmp_path / "gelu").exists(), "an argument is no file to write"
    assert missing == []
    assert not right_is_wrong and 0 < right < wrong
    assert "no implementation called triton" in absent


@pytest.mark.recorded("kernels")
def test_a_dry_run_of_one_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows, its exit code and its empty tables, with a stub compiler and a stub interpreter."""
    tables = dry._listed(tmp_path / "listed.jsonl")
    monkeypatch.setattr(dry, "_listed", lambda *_: tables)
    monkeypatch.setattr(dry, "DRY_FILE", ROOT / "build" / "gpu" / f"{tmp_path.name}.json")
    serialized = "C7515: wgmma.mma_async instructions are serialized"
    for max_err, faults, wrong in ((0.001, [], ""), (0.5, [], "error 0.5"), (0.001, [serialized], serialized)):
        numerics = {"norm": {"max_err": max_err, "tol": 0.01, "reason": ""}}
        monkeypatch.setattr(dry, "_compiled", lambda *_, faults=faults: [compiled("norm", faults)])
        monkeypatch.setattr(dry, "_numerics", lambda *_, numerics=numerics: numerics)
        said: list[str] = []
        assert dry.run(Options(work_dir=tmp_path), said.append, lambda row: False) == int(bool(wrong))
        (row,) = json.loads(dry.DRY_FILE.read_text())["rows"]
        dry.DRY_FILE.unlink()
        assert (row["op"], row["sm"], row["max_err"], row["tol"]) == ("norm", 90, max_err, 0.01)
        assert [line for line in said if "WRONG" in line] == [f"WRONG norm, bf16, sm_90: {wrong}"] * bool(wrong)
        text = capsys.readouterr().out
        assert "decode attention" in text and "8b gate_up 4096x28672" in text and "transformers" in text
        assert "not measured" in text and "GB/s" not in text and "240, then 255 (goal, H200)" in text


@pytest.fixture
def checks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run without its other parts."""
    monkeypatch.setattr(dry, "DRY_FILE", ROOT / "build" / "gpu" / f"{tmp_path.name}.json")
    monkeypatch.setattr(dry, "_listed", lambda *_: {})
    monkeypatch.setattr(dry, "_numerics", lambda *_: {"norm": {"max_err": 0.0, "tol": 0.0, "reason": ""}})
    monkeypatch.setattr(dry, "_compiled", lambda *_: [compiled("norm")])


def wrong(options: Options, *asked: str) -> list[str]:
    """Findings of a dry run of these rows of checks."""
    said: list[str] = []
    code = dry.run(options, said.append, lambda row: row.key in asked)
    dry.DRY_FILE.unlink()
    found = [line.removeprefix("WRONG ") for line in said if line.startswith("WRONG ")]
    assert code == int(bool(found))
    return found


READING = """
import sys
from benchmarks.gpu.child import main
from inferd.engine.sample.sampler import Sampler
sample = Sampler.sample
def reading(self, logits, *rest):
    logits.max().item()
    return sample(self, logits, *rest)
Sampler.sample = reading
sys.exit(main())
"""


def reading(row: Row, into: Path, options: Options) -> list[str]:
    """The row's process, whose sampler looks at a logit before it draws."""
    python, isolated, _, _, *arguments = child_command(row, into, options)
    return [python, isolated, "-c", READING, *arguments]


@pytest.mark.recorded("models")
@pytest.mark.usefixtures("checks_alone")
def test_no_step_is_read_back_while_it_is_launched(tmp_path: Path) -> None:
    assert wrong(Options(work_dir=tmp_path), "checks/launches") == []


@pytest.mark.recorded("kernels")
@pytest.mark.usefixtures("checks_alone")
def test_a_read_back_while_a_step_is_launched_is_found(tmp_path: Path) -> None:
    (line,) = wrong(Options(work_dir=tmp_path, command=reading), "checks/launches")
    assert line.startswith("checks/launches: wrong: 1 of 1") and "a launch waited: item" in line


WITHOUT_MSGSPEC = """
import sys
sys.modules["msgspec"] = None
from benchmarks.gpu.child import main
sys.exit(main())
"""


def without_msgspec(row: Row, into: Path, options: Options) -> list[str]:
    """The row's process on a machine that lacks msgspec."""
    python, isolated, _, _, *arguments = child_command(row, into, options)
    return [python, isolated, "-c", WITHOUT_MSGSPEC, *arguments]


@pytest.mark.usefixtures("checks_alone")
def test_a_row_that_lacks_a_package_has_failed(tmp_path: Path) -> None:
    (line,) = wrong(Options(work_dir=tmp_path, command=without_msgspec), "checks/overlap")
    assert line.startswith("checks/overlap: failed: ")
    assert line.endswith("ModuleNotFoundError: import of msgspec halted; None in sys.modules")


def test_only_rows_of_tests_need_pytest(tmp_path: Path) -> None:
    """A machine with a GPU may lack it."""
    code = "import sys; sys.modules['pytest'] = None; import benchmarks.gpu.checks, benchmarks.gpu.engine"
    env = environment(make_tree(tmp_path))
    subprocess.run([sys.executable, "-P", "-c", code], env=env, cwd=tmp_path, check=True)


LOSING = """
import os, sys
into, point, *lost = sys.argv[1:]
with open(into, "w") as file:
    file.write(point)
for path in lost:
    os.remove(path)
"""
POINT = Point(Case(table="engine checks", labels={"check": "one"}), Trial(error=0.0, tolerance=0.0))


@pytest.mark.usefixtures("checks_alone")
@pytest.mark.parametrize("name", ["nothing", "points", "results"])
def test_a_lost_file_is_found(tmp_path: Path, name: str) -> None:
    """A row that lost its points, and a row that is not among the results because a later one removed the file."""

    def losing(row: Row, into: Path, options: Options) -> list[str]:
        lost = {"nothing": [], "points": [into], "results": [options.work_dir / "dry" / "results.jsonl"]}[name]
        again = lost if row.name == "overlap" else []
        return [sys.executable, "-c", LOSING, str(into), json.dumps(POINT.as_json()), *map(str, again)]

    results_file = tmp_path / "dry" / "results.jsonl"
    expected = {
        "nothing": [],
        "points": ["checks/overlap: failed: it ended well and left no point: checks-overlap.points is gone"],
        "results": [f"checks/greedy qwen3: its result is not in {results_file}"],
    }
    assert wrong(Options(work_dir=tmp_path, command=losing), "checks/greedy qwen3", "checks/overlap") == expected[name]


def test_parts_whose_file_is_lost_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes end well and write nothing."""
    monkeypatch.setattr(dry, "DRY_FILE", ROOT / "build" / "gpu" / f"{tmp_path.name}.json")
    monkeypatch.setattr(dry, "TABLE", tmp_path / "compiled.json")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, ""))
    names = ("numeric checks", "compilation", "headline", "peers", "kernels", "engine")
    assert wrong(Options(work_dir=tmp_path)) == [
        *(f"{name}: gave nothing" for name in names),
        f"compiled.json is gone: python -m inferd.kernels.compile.aot --write {dry.TABLE}",
    ]


def test_other_code_than_the_tables_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry, "TABLE", tmp_path / "table.json")
    into, row = tmp_path / "compiled.json", compiled("norm")
    for triton, rows, others in (
        ("3", [row], None),
        ("4", [{**row, "registers": 41}], None),
        ("3", [{**row, "registers": 41}], "1 of 1 forms are not among the 1 of table.json"),
        ("4", [row, compiled("rope")], "0 of 2 forms are not among the 1 of table.json"),
    ):
        dry.TABLE.write_text(json.dumps({"triton": "3", "rows": [row]}))
        into.write_text(json.dumps({"triton": triton, "rows": rows}))
        found = list(dry._unlike_the_table(into))
        assert [line.partition(":")[0] for line in found] == ([] if others is None else [others])
