"""The first part on a GPU: each planted fault makes its point wrong, and later points are still found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import first
from benchmarks.gpu.bench import Bench, CannotRunError
from benchmarks.gpu.points import Case, Point, Trial
from benchmarks.gpu.report import render
from benchmarks.gpu.runner import Result
from benchmarks.gpu.tree import ROOT
from inferd.engine.api.wire.messages import Phase
from inferd.engine.worker import load as worker
from inferd.kernels.ops import linear_fp8


def found(question: Callable[[Bench], None]) -> list[Point]:
    points: list[Point] = []
    question(Bench("cpu", points.append, is_rehearsal=True))
    return points


def wrong(question: Callable[[Bench], None]) -> list[bool]:
    return [point.trial.is_wrong for point in found(question)]


def test_an_error_makes_one_point_wrong_and_shows_where(tmp_path: Path) -> None:
    def fail() -> Trial:
        raise ValueError("a kernel | failed")

    def ask(bench: Bench) -> None:
        for name, run in (("one", fail), ("other", lambda: Trial(error=0.0, tolerance=0.0))):
            bench.measure(Case(table="questions", labels={"of": name}), run)

    points = found(ask)
    assert [point.trial.is_wrong for point in points] == [True, False]
    kept = Point.from_json(json.loads(json.dumps(points[0].as_json())))
    assert (
        "in fail" in kept.trial.note
        and str(ROOT) not in kept.trial.note
        and kept.trial.note.endswith("ValueError: a kernel | failed\n")
    )
    table = render([Result("first/x", "wrong", 1.0, "", tuple(points))], "one")
    assert "| WRONG | ValueError: a kernel / failed |" in " ".join(table.split())


def test_what_does_not_apply_ends_the_row() -> None:
    def refuse() -> Trial:
        raise CannotRunError("no 8-bit floats")

    with pytest.raises(CannotRunError):
        found(lambda bench: bench.measure(Case(table="questions", labels={}), refuse))


def test_a_device_that_can_do_no_more_ends_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses all work after an access to wrong memory."""
    points: list[Point] = []

    def fail() -> Trial:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal memory"):
        Bench("cuda", points.append).measure(Case(table="questions", labels={}), fail)
    assert [point.trial.is_wrong for point in points] == [True]


def test_a_package_that_is_missing_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "IMPORTS", {"torch": "torch", "not_there": "not-there", "numpy": "numpy"})
    monkeypatch.setattr(first, "OURS", ("inferd.kernels.gpu",))
    assert wrong(first.imports) == [False, True, False, False]


def test_a_replay_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def step() -> Tensor:
        nonlocal calls
        calls += 1
        return torch.full((2,), float(calls == 3))

    monkeypatch.setattr(first, "_step", lambda *_, **__: step)
    assert wrong(first.captures) == [True, False, False, False]


def test_8_bit_products_are_right_and_a_wrong_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "FP8_ROWS", (9,))
    assert wrong(first.fp8) == [False] * 3
    right = linear_fp8.linear_fp8

    def last_scale_is_the_first(q: Tensor, scales: Tensor, *others: Any) -> linear_fp8.Apply:
        spoilt = scales.clone()
        spoilt.view(-1)[-1] = scales.view(-1)[0]
        return right(q, spoilt, *others)

    monkeypatch.setattr(linear_fp8, "linear_fp8", last_scale_is_the_first)
    assert wrong(first.fp8)[2], "one scale of 15 blocks"


@pytest.mark.parametrize(("held", "is_wrong"), [(100.0, False), (102.9, False), (104.0, True)])
def test_more_memory_than_the_plan_is_wrong(held: float, is_wrong: bool) -> None:
    points: list[Point] = []
    first._note(Bench("cuda", points.append), "ready", held, 100.0)
    assert [point.trial.is_wrong for point in points] == [is_wrong]


def test_what_is_known_before_a_start_fails_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: object, started_s: float, report: Callable[[Phase], None]) -> None:
        report(Phase("tuning", 1.0, ""))
        raise RuntimeError("the capture failed")

    monkeypatch.setattr(worker, "load_worker", load)
    points = found(first.memory)
    assert [(point.case.labels["of"], point.trial.is_wrong) for point in points] == [
        ("tuning", False), ("all steps", True)
    ]  # fmt: skip
    assert points[1].trial.note.endswith("RuntimeError: the capture failed\n")


def test_an_engine_starts_and_computes_in_a_rehearsal() -> None:
    """A small model takes less than an allocator keeps, so only a GPU's own count can be held to a bound."""
    points = found(first.memory)
    assert [point.case.labels["of"] for point in points] == ["ready, without KV", "20 steps, without KV", "all steps"]
    assert points[-1].trial.note == "KV cache 64 MiB" and points[0].trial.figures["planned MiB"] > 0
