"""The driver of GPU rows: a wrong result has no speed, floors are those by hand. `test_gpu_runner` runs rows."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import catalogue, floors, report
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.points import KERNEL_TESTS, Case, Phase, Point, Rates, Trial
from benchmarks.gpu.profile import Span, Summary, read_counters
from benchmarks.gpu.runner import Result
from tests.benchmarks.test_gpu_runner import point

H200 = Rates(4.3e12, {"bf16": 790e12, "fp8": 1580e12})


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
        "there is no part 'speed'; there are first, headline, profile, peers, checks, kernels, engine"
        in capsys.readouterr().err
    )
