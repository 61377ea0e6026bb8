"""The driver of GPU rows: a hang costs one row, results are kept, a wrong result has no speed, floors are those by
hand."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import catalogue, floors, report
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.points import KERNEL_TESTS, Case, Phase, Point, Rates, Trial
from benchmarks.gpu.profile import Span, Summary, read_counters
from benchmarks.gpu.runner import SKIPPED, Options, Result, Results, Row, digest_of, progress, run_row, run_rows
from benchmarks.gpu.tree import ROOT, environment, make_tree

H200 = Rates(4.3e12, {"bf16": 790e12, "fp8": 1580e12})


def point(seconds: float | None = 1e-3, error: float | None = 0.0, **labels: str) -> Point:
    phases = (Phase(2e9, 1e9),)
    trial = Trial(seconds=seconds, error=error, tolerance=None if error is None else 0.1, figures={"x ms": 3.0})
    return Point(Case(table="things", labels=labels or {"shape": "a"}, phases=phases), trial)


# -- rows --------------------------------------------------------------------------------------------------------------

PROGRAMS = {
    "right": "emit(0.0)",
    "wrong": "emit(0.0); emit(0.5)",
    "notes": "point['trial'].update(seconds=None, figures={}); emit(None)",
    "hangs": "emit(0.0); time.sleep(60)",
    "crashes": "emit(0.0); print('about to', flush=True); os.abort()",
    "raises": "raise ValueError('the reason')",
    "skips": "file.write(json.dumps({'skipped': 'no fastapi'})); file.close(); sys.exit(SKIPPED)",
    "meets": """
os.makedirs(folder := os.path.dirname(sys.argv[1]) + "/here", exist_ok=True)
open(mine := f"{folder}/{os.getpid()}", "w").close()
while len(os.listdir(folder)) < 2:
    time.sleep(0.01)
time.sleep(0.5)
os.remove(mine)
emit(0.0)
""",
    "slow": "emit(0.0); time.sleep(2.5); emit(0.0)",
    "imports": "emit(0.0); file.write(json.dumps({'files': [os.environ['SOURCE']]}))",
    "leaves a child": "subprocess.Popen(['sleep', '60']); emit(0.0)",
}
PROLOGUE = f"""
import json, os, subprocess, sys, time
file, point, SKIPPED = open(sys.argv[1], "w"), json.loads(sys.argv[2]), {SKIPPED}
def emit(error):
    point["trial"]["error"] = error
    file.write(json.dumps(point) + chr(10))
    file.flush()
"""


def command(row: Row, into: Path, options: Options) -> list[str]:
    return [sys.executable, "-c", PROLOGUE + PROGRAMS[row.target], str(into), json.dumps(point().as_json())]


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(work_dir=tmp_path / "work", command=command)


def rows(*names: str, **changes: Any) -> list[Row]:
    return [Row("kernels", name, name, **{"timeout_s": 20.0, **changes}) for name in names]


@pytest.mark.parametrize(
    ("name", "status", "num_points", "reason"),
    [
        ("right", "ok", 1, ""),
        ("wrong", "wrong", 2, "1 of 2; things, a: error 0.5, tolerance 0.1"),
        ("crashes", "failed", 1, "signal SIGABRT; the end of what it said: about to"),
        ("raises", "failed", 0, "ValueError: the reason"),
        ("skips", "skipped", 0, "no fastapi"),
        ("leaves a child", "ok", 1, ""),
    ],
)
def test_what_becomes_of_a_row(options: Options, name: str, status: str, num_points: int, reason: str) -> None:
    result = run_row(rows(name)[0], options, timeout_s=20.0)
    assert (result.status, len(result.points)) == (status, num_points)
    assert reason in result.reason and bool(reason) == bool(result.reason)
    assert Result.from_json(json.loads(json.dumps(result.as_json()))) == replace(
        result, took_s=round(result.took_s, 2), points=tuple(Point.from_json(p.as_json()) for p in result.points)
    )


def test_a_hang_costs_its_row_alone_and_keeps_what_it_gave(options: Options, tmp_path: Path) -> None:
    said: list[str] = []
    results = Results(tmp_path / "results.jsonl")
    done, left = run_rows([*rows("hangs", timeout_s=1.0), *rows("right")], results, options, said.append)
    assert [(r.key, r.status) for r in done] == [("kernels/hangs", "timed out"), ("kernels/right", "ok")]
    assert not left and len(done[0].points) == 1 and "not over after 1 s" in done[0].reason
    assert said[0].startswith("kernels/hangs: timed out in 1.") and said[1].startswith("kernels/right: ok in ")


def test_a_second_call_runs_what_is_not_right_yet(options: Options, tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    asked = rows("right", "raises", "skips", "wrong")
    run_rows(asked[:3], results, options, lambda _: None)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"row": "kernels/wrong", "sta')  # the machine was taken away during this write
    assert set(results.read()) == {"kernels/right", "kernels/raises", "kernels/skips"}
    done, _ = run_rows(asked, results, options, lambda _: None)
    assert [result.key for result in done] == ["kernels/raises", "kernels/skips", "kernels/wrong"]
    done, _ = run_rows(asked[:1], results, replace(options, is_again=True), lambda _: None)
    assert [result.key for result in done] == ["kernels/right"]
    assert {key: result.status for key, result in results.read().items()} == {
        "kernels/right": "ok",
        "kernels/raises": "failed",
        "kernels/skips": "skipped",
        "kernels/wrong": "wrong",
    }


def test_a_row_runs_again_if_its_source_has_changed(options: Options, tmp_path: Path) -> None:
    """Files that its process imported count, and folders whose code it runs in other processes."""
    source = ROOT / "build" / "gpu" / f"{tmp_path.name}.py"
    source.parent.mkdir(parents=True, exist_ok=True)
    folder = str(source.parent.relative_to(ROOT))
    results = Results(tmp_path / "results.jsonl")
    asked = [*rows("right"), *rows("imports", variables={"SOURCE": str(source.relative_to(ROOT))})]
    asked += [replace(row, name="starts a server", folders=(folder,)) for row in rows("right")]
    try:
        for content, expected in (("one", 3), ("one", 0), ("two", 2)):
            source.write_text(content)
            assert len(run_rows(asked, results, options, lambda _: None)[0]) == expected
        assert results.read()["kernels/imports"].digest == digest_of([str(source.relative_to(ROOT))])
    finally:
        source.unlink()
    assert digest_of([str(source.relative_to(ROOT))]) == "", "a file that is gone"


@pytest.mark.parametrize(
    "changes",
    [{"device": "cpu"}, {"device_name": "another"}, {"is_rehearsal": True}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_row_runs_again_on_another_device(options: Options, tmp_path: Path, changes: dict[str, Any]) -> None:
    results = Results(tmp_path / "results.jsonl")
    run_rows(rows("right"), results, options, lambda _: None)
    assert len(run_rows(rows("right"), results, options, lambda _: None)[0]) == 0
    assert len(run_rows(rows("right"), results, replace(options, **changes), lambda _: None)[0]) == 1


def test_a_row_runs_again_if_it_is_defined_anew_or_found_nothing_or_prepares(options: Options, tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    (right,) = rows("right")
    kinds = [right, replace(right, name="notes", target="notes"), replace(right, name="prepares", is_preparation=True)]
    for asked, expected in (
        (kinds, ["right", "notes", "prepares"]),
        (kinds, ["notes", "prepares"]),
        ([replace(right, arguments={"lengths": [7]})], ["right"]),
        ([replace(right, variables={"SEED": "1"})], ["right"]),
    ):
        done = run_rows(asked, results, options, lambda _: None)[0]
        assert [result.key.partition("/")[2] for result in done] == expected


def test_a_run_that_was_cut_off_does_not_hide_a_whole_one(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    whole = Result("kernels/a", "ok", 1.0, "2030-01-01T00:00:00+00:00", (point(), point()))
    results.append(whole)
    results.append(replace(whole, status="running", points=()))
    results.append(replace(whole, status="running", points=(point(),)))
    assert results.read() == {"kernels/a": whole}
    results.append(replace(whole, status="wrong", points=(point(),)))
    assert results.read()["kernels/a"].status == "wrong"
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"row": "kernels/b", "of": "another version"}\n')
    assert list(results.read()) == ["kernels/a"]


def test_points_of_a_row_that_runs_are_stored_before_it_ends(options: Options, tmp_path: Path) -> None:
    """If this process is killed, they are in the file, and the row runs again."""
    path = tmp_path / "results.jsonl"
    seen: list[list[int]] = []
    results = Results(path)
    append = results.append

    def watch(result: Result) -> None:
        append(result)
        seen.append([len(found.points) for found in Results(path).read().values()])

    result = run_row(rows("slow")[0], options, 20.0, watch)
    assert result.status == "ok" and [0] in seen and [1] in seen
    assert seen == sorted(seen) and results.read()["kernels/slow"].status == "running"
    assert [row.status for row in run_rows(rows("slow"), results, options, lambda _: None)[0]] == ["ok"]
    assert len(results.read()["kernels/slow"].points) == 2, "its own points alone"


def test_a_folder_that_is_emptied_gets_earlier_results_from_the_copy(options: Options, tmp_path: Path) -> None:
    first, second, copy = (tmp_path / name / "results.jsonl" for name in ("first", "second", "copy"))
    run_rows(rows("right", "wrong"), Results(first, copy), options, lambda _: None)
    Results(first, copy).append(Result("kernels/cut off", "running", 0.0, "2030-01-01T00:00:00+00:00"))
    Results(copy).append(Result("kernels/cut off", "running", 1.0, "2030-01-01T00:00:01+00:00", (point(),)))
    results = Results(second, copy)
    assert results.read() == Results(copy).read() and len(results.read()["kernels/cut off"].points) == 1
    done, _ = run_rows(rows("right", "wrong"), results, options, lambda _: None)
    assert [result.key for result in done] == ["kernels/wrong"]
    size = copy.stat().st_size
    assert Results(copy, copy).read() == results.read() and copy.stat().st_size == size, "one file under two names"


def test_rows_beyond_the_budget_are_left_and_have_no_result(options: Options, tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    done, left = run_rows(rows("right"), results, replace(options, until_s=0.0), lambda _: None)
    assert (done, [row.key for row in left], results.read()) == ([], ["kernels/right"], {})


def test_checks_run_side_by_side(options: Options, tmp_path: Path) -> None:
    """Two rows that wait for each other end only if both run."""
    pair = [Row("checks", name, "meets", timeout_s=10.0, is_timed=False) for name in ("one", "two")]
    done, _ = run_rows(pair, Results(tmp_path / "a.jsonl"), replace(options, jobs=2), lambda _: None)
    assert [result.status for result in done] == ["ok", "ok"]


def test_measurements_have_the_machine_to_themselves(options: Options, tmp_path: Path) -> None:
    """The first row waits in vain; the second finds the first one's file."""
    pair = [Row("kernels", name, "meets", timeout_s=1.0) for name in ("one", "two")]
    done, _ = run_rows(pair, Results(tmp_path / "a.jsonl"), replace(options, jobs=2), lambda _: None)
    assert [result.status for result in done] == ["timed out", "ok"]


# -- points and tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [0.2, math.nan, math.inf])
def test_a_wrong_point_has_no_speed_anywhere(error: float) -> None:
    wrong = point(error=error)
    assert wrong.trial.is_wrong
    trial = wrong.as_json()["trial"]
    assert trial["seconds"] is None and not trial["figures"] and trial["is_wrong"]
    again = Point.from_json(json.loads(json.dumps(wrong.as_json())))
    assert again.trial.is_wrong and again.trial.seconds is None
    for shown in (wrong, again):
        text = report.render([Result("kernels/a", "wrong", 1.0, "", (shown,))], "title")
        assert "WRONG" in text and "1 ms" not in text and "GB/s" not in text


def rate(what: str, unit: str, value: float) -> Point:
    return Point(Case(table="rates", labels={"what": what}), Trial(seconds=1.0, figures={unit: value}))


def test_a_table_stands_beside_rates_of_the_same_run() -> None:
    measured = Result("kernels/rates", "ok", 1.0, "", (rate("copy", "bytes/s", 4e12), rate("bf16", "flop/s", 8e14)))
    model = Point(
        Case(table="engine", labels={"point": "decode"}, phases=(Phase(4e9),), amount=2.0, goal="9 (goal)"),
        Trial(seconds=2e-3, error=0.0, tolerance=0.0),
    )
    results = [measured, Result("kernels/a", "ok", 1.0, "", (point(),)), Result("engine/b", "ok", 1.0, "", (model,))]
    text = report.render(results, "title")
    assert "copy 4.00 TB/s, products bf16 800 TFLOP/s" in text
    lines = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "|" in line
    }
    assert lines["a"] == ["a", "1 ms", "2,000", "50%", "1.00", "500 us", "50%", "3.00", "0.0e+00", "1.0e-01", "right"]
    assert lines["decode"][:5] == ["decode", "2 ms", "1,000", "2,000", "50%"]
    assert lines["decode"][5] == "9 (goal)"


def test_without_a_measurement_no_number_has_a_time_in_it() -> None:
    results = [Result("kernels/a", "ok", 1.0, "", (point(), rate("copy", "bytes/s", 4e12)))]
    text = report.render(results, "title", is_measured=False)
    assert "not measured" in text
    assert not any(figure in text for figure in ("ms", "GB/s", "4.00", "TB/s"))


def test_tests_are_counted_by_file_and_failures_are_named() -> None:
    def of(test: str, trial: Trial) -> Point:
        return Point(Case(table=KERNEL_TESTS, labels={"tests": "test_a.py", "test": test}), trial)

    failed = Trial(error=math.inf, tolerance=0.0, note="call: assert 1 | 2")
    points = (
        *(of(f"one[{n}]", Trial(error=0.0, tolerance=0.0)) for n in range(3)),
        of("two", failed),
        of("x", Trial()),
    )
    text = report.render([Result("checks/tests a", "wrong", 1.0, "", points)], "title")
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line][2:4] == [
        ["test_a.py", "3.00", "1.00", "1.00", ""],
        ["", "", "", "", "two: call: assert 1 / 2"],
    ]


def test_a_step_is_busy_while_any_kernel_runs() -> None:
    spans = [Span("a", 0, 10), Span("b", 5, 15), Span("a", 20, 30), Span("c", 22, 24)]
    found = Summary(spans, num_steps=2)
    assert (found.wall_us, found.busy_us) == (30, 25)
    assert found.by_kernel() == [("a", 2, 20), ("b", 1, 10), ("c", 1, 2)]


def test_counters_are_read_from_the_profilers_table() -> None:
    output = """==PROF== Connected to process 7
a line of the program
"ID","Kernel Name","dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum"
"","","%","ns"
"0","_few_rows","91.25","61,250"
"""
    assert read_counters(output.splitlines()) == {"memory %": 91.25, "us": 61.25}
    assert read_counters(["==ERROR== no permission"]) == {}


# -- floors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "rows", "tokens_per_s"),
    [("8b", 1, 284), ("8b", 32, 7128), ("8b", 256, 19_900), ("0.6b", 1, 3280)],
)
def test_decode_floors_by_hand(model: str, rows: int, tokens_per_s: float) -> None:
    """8B: 15.01 GB of weights and 131,072 B of KV for each token. Products and KV bound 256 rows."""
    phases = floors.decode_phases(MODELS[model].shape, "bf16", rows, 1024)
    assert rows / floors.floor_s(phases, H200) == pytest.approx(tokens_per_s, rel=0.003)
    if model == "8b":
        assert phases[0].num_bytes == pytest.approx(15.01e9, rel=1e-3)
        assert phases[1].num_bytes == rows * 1024 * 131_072


def test_prefill_and_load_floors_by_hand() -> None:
    """13.96 GFLOP for each token, and attention in addition. A load is the prompts and steps of its waves."""
    shape = MODELS["8b"].shape
    phases = floors.prefill_phases(shape, "bf16", 4, 2048)
    assert phases[0].num_flops / (4 * 2048) == pytest.approx(13.96e9, rel=1e-3)
    assert 4 * 2048 / floors.floor_s(phases, H200) == pytest.approx(54_500, rel=0.003)
    load = floors.load_phases(shape, "bf16", 256, 512, 1024, 1024)
    assert 11_500 < 512 * 1024 / floors.floor_s(load, H200) < 12_000
    one = floors.load_phases(shape, "bf16", 256, 256, 1024, 1024)
    assert floors.floor_s(load, H200) == pytest.approx(2 * floors.floor_s(one, H200))


def test_a_goal_is_below_its_floor_and_says_that_it_is_one() -> None:
    assert floors.goal("8b", "bf16", "decode 1 x 1024") == "240, then 255 (goal, H200)"
    assert floors.goal("8b", "bf16", "decode 7 x 1024") == ""
    for (model, precision, what), goal in floors.GOALS.items():
        if what.startswith("decode"):
            rows_, context = map(int, what.removeprefix("decode ").split(" x "))
            phases = floors.decode_phases(MODELS[model].shape, precision, rows_, context)
            assert (goal.best or goal.least) < rows_ / floors.floor_s(phases, H200)


# -- what is listed ----------------------------------------------------------------------------------------------------


def test_every_row_has_a_name_of_its_own_and_a_target() -> None:
    every = [row for part in catalogue.PARTS for row in catalogue.rows(part)]
    assert len({row.key for row in every}) == len({row.file_name for row in every}) == len(every)
    from benchmarks.gpu.child import target_of  # noqa: PLC0415

    assert all(callable(target_of(row.target)) for row in every)


def test_parts_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--part", "checks,speed"])
    assert (
        "there is no part 'speed'; there are headline, profile, peers, checks, kernels, engine"
        in capsys.readouterr().err
    )


def test_the_tree_is_an_import_root_without_the_checkout(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    assert make_tree(tmp_path) == tree, "a second time"
    code = "import inferd.kernels.aot, benchmarks.tables, sys; print(inferd.kernels.__file__); import kernels"
    env = {**environment(tree), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout.startswith(str(tree)) and "No module named 'kernels'" in done.stderr
    assert "TRITON_INTERPRET" not in environment(tree)


def test_a_row_runs_from_the_program_to_the_table(tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["--rehearse", "--part", "kernels", "--row", "kernels/machine", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *asked], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "kernels/machine: ok" in done.stderr and "Times: not measured." in done.stdout
    result = Results(out / "results.jsonl").read()["kernels/machine"]
    assert "torch" in result.points[0].trial.note and result.digest
    assert {"benchmarks/gpu/machine.py", "benchmarks/gpu/points.py"} <= set(result.files)
    assert progress(result).startswith("kernels/machine: ok in ")
    assert sorted(os.listdir(out)) == ["results.jsonl", "tables.md"]
    assert (out / "tables.md").read_text().startswith("# inferd on rehearsal")
