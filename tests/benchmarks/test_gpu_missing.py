"""A point that should have been found on a GPU and was not is wrong. What the device cannot do is skipped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import accuracy, attention, catalogue, checks, engine, invariance, linears, numeric
from benchmarks.gpu.bench import Bench, CannotRunError
from benchmarks.gpu.numeric import CheckResult
from benchmarks.gpu.points import Point, Trial
from inferd.kernels import gpu
from inferd.kernels.device import DeviceProperties
from inferd.kernels.registry import KernelError


class Found:
    """A bench of a GPU that is not there, and what it recorded."""

    def __init__(self, patch: pytest.MonkeyPatch, sm: int = 90) -> None:
        patch.setattr(gpu, "properties_of", lambda *_: DeviceProperties.of(sm, 108))
        self.points: list[Point] = []
        self.bench = Bench("cuda", self.points.append)

    @property
    def trials(self) -> list[Trial]:
        return [point.trial for point in self.points]


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (engine.decode, {"model": "8b", "precision": "fp8"}),
        (engine.decode, {"model": "8b", "precision": "bf16", "kv": "fp8"}),
        (linears.products, {"model": "8b", "precision": "fp8", "rows": (1,)}),
        (attention.decode, {"contexts": (1024,), "kv": "fp8"}),
        (invariance.linears, {"precision": "fp8"}),
        (invariance.decoder, {"precision": "fp8"}),
        (accuracy.random_weights, {"model": "0.6b"}),
        (checks.kernel_tests, {"file": "test_linear_fp8.py"}),
    ],
)
def test_fp8_is_skipped_on_a_gpu_without_it(
    target: Any, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotRunError, match=r"^compute capability 8\.6 has no 8-bit floats$"):
        target(Found(monkeypatch, 86).bench, **arguments)
    Found(monkeypatch, 89).bench.require("fp8")
    Found(monkeypatch, 86).bench.require("bf16", "int8")


@pytest.mark.parametrize(("sm", "is_wrong"), [(86, [True, False, False]), (90, [True, True, False])])
def test_a_numeric_check_that_did_not_run_is_wrong(
    sm: int, is_wrong: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {
        "gelu": CheckResult(None, None, "triton is used for other shapes"),
        "linear_fp8": CheckResult(None, None, "refused"),
        "rope": CheckResult(0.0, 0.1),
    }
    monkeypatch.setattr(numeric, "CHECKS", dict.fromkeys(found))
    monkeypatch.setattr(numeric, "check", lambda name, _: found[name])
    made = Found(monkeypatch, sm)
    numeric.numerics(made.bench)
    assert [trial.is_wrong for trial in made.trials] == is_wrong
    assert made.trials[0].note == "triton is used for other shapes"


def test_steps_that_a_gpu_does_not_record_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without C++ kernels records none."""
    steps = SimpleNamespace(num_differing=lambda _: None, recorded=SimpleNamespace(refusal="the reason"))
    monkeypatch.setattr(checks, "random_decoder", lambda *_: None)
    monkeypatch.setattr(checks, "_Steps", lambda *_: steps)
    made = Found(monkeypatch)
    checks.graphs(made.bench)
    assert {(trial.is_wrong, trial.note) for trial in made.trials} == {(True, "not recorded: the reason")}
    points: list[Point] = []
    checks.graphs(Bench("cpu", points.append, is_rehearsal=True))
    assert not any(point.trial.is_wrong for point in points)


def test_a_library_may_be_missing_and_our_kernel_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Trial:
        raise KernelError("nothing runs (flash: not installed)")

    monkeypatch.setattr(attention, "_trial", refuse)
    bench = Found(monkeypatch).bench
    assert attention._library_trial(bench, [(0, 1)], "triton").is_wrong
    assert not attention._library_trial(bench, [(0, 1)], next(iter(attention.LIBRARIES))).is_wrong


@pytest.mark.parametrize(
    ("code", "note"),
    [
        (pytest.ExitCode.NO_TESTS_COLLECTED, "it has no test that runs here"),
        (pytest.ExitCode.OK, "all of its tests were skipped"),
        (pytest.ExitCode.INTERNAL_ERROR, "pytest ended with <ExitCode.INTERNAL_ERROR: 3>"),
    ],
)
def test_a_file_of_which_no_test_ran_is_wrong(
    code: pytest.ExitCode, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest, "main", lambda *_, **__: code)
    made = Found(monkeypatch)
    checks.kernel_tests(made.bench, "test_linear.py")
    assert [(trial.is_wrong, trial.note) for trial in made.trials] == [(True, note)]


def test_files_without_a_test_of_triton_are_no_rows() -> None:
    assert {"test_linear_int8.py", "test_linear_int4.py"}.isdisjoint(catalogue.kernel_tests())
    assert {"test_linear_integers_triton.py", "test_linear_fp8.py"} <= set(catalogue.kernel_tests())
