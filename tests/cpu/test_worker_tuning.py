"""The table of fastest products at a start: measured once, kept, repaired, and never a reason to refuse to serve. The
device and its clock are simulated; the layers' cases are real."""

from __future__ import annotations

import logging
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inferd.engine.worker import tuning
from inferd.engine.worker.tuning import Tuning
from inferd.kernels.ops.linear import few_rows_refuse
from inferd.kernels.ops.linear.tuning import BUCKETS, FEW_ROWS, LIBRARY, Table, cases

SHAPES = ((64, 32), (96, 32), (64, 32))
"""Cases of the weights of three layers, two of them alike."""


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "few_rows_refuse", lambda *_: None)
    monkeypatch.setattr(tuning, "_device_name", lambda: "made up, torch 0")


def load(directory: Path) -> tuple[Table, Counter[str], str]:
    """Does what a start does: layers add cases, then the table is completed. Returns (table, what was timed, the
    text)."""
    found = Tuning.open(directory, torch.bfloat16)
    assert found is not None
    timed: Counter[str] = Counter()

    def measured(name: str, seconds: float) -> Callable[[], float]:
        def run() -> float:
            timed[name] += 1
            return seconds

        return run

    for out_size, in_size in SHAPES:
        for case in found.table.missing(cases(out_size, in_size, "torch.bfloat16")):
            few = measured(case.name, case.num_rows)
            found.table.offer(case, {FEW_ROWS: few, LIBRARY: measured(case.name, 3.0)})
    return found.table, timed, found.complete()


NUM_CASES = 2 * len(BUCKETS)


def test_a_shape_is_measured_once_and_never_again(tmp_path: Path) -> None:
    table, timed, said = load(tmp_path / "tuning")
    assert len(timed) == NUM_CASES
    assert set(timed.values()) == {2}, "each product of a case, of one of the layers that are alike"
    assert said == f"{NUM_CASES} choices measured, kept in {tmp_path / 'tuning'}"
    chosen = {case.num_rows: table.choice(case) for case in cases(64, 32, "torch.bfloat16")}
    assert chosen == {1: FEW_ROWS, 2: FEW_ROWS, 4: LIBRARY, 8: LIBRARY, 16: LIBRARY}
    again, timed, said = load(tmp_path / "tuning")
    assert (again.choices, timed.total()) == (table.choices, 0)
    assert said == f"every choice is known from {tmp_path / 'tuning'}"


def test_another_model_adds_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(tmp_path)
    monkeypatch.setattr("tests.cpu.test_worker_tuning.SHAPES", ((128, 64),))
    table, timed, _ = load(tmp_path)
    assert len(timed) == len(BUCKETS)
    assert len(table.choices) == NUM_CASES + len(BUCKETS)


def test_a_damaged_file_is_repaired(tmp_path: Path) -> None:
    table, _, _ = load(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    repaired, timed, _ = load(tmp_path)
    assert len(timed) == NUM_CASES
    assert repaired.choices == table.choices
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (whole, [file])


def test_the_file_is_never_seen_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written under another name, and renamed when it is complete."""
    before: list[list[str]] = []
    replace = Path.replace

    def replaced(source: Path, target: Path) -> Path:
        before.append([path.name for path in tmp_path.iterdir()])
        assert b'"version"' in source.read_bytes()
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", replaced)
    load(tmp_path)
    ((first,),) = before
    assert first.startswith(".linear-")
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize("obstacle", ["a file in its place", "a directory that is read-only"])
def test_what_cannot_be_kept_is_used_and_warned_of(
    tmp_path: Path, obstacle: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "tuning"
    if obstacle == "a file in its place":
        directory.write_text("")
    else:
        directory.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)

        def refused(**_: object) -> None:
            raise PermissionError(13, "Permission denied", str(directory))

        monkeypatch.setattr("inferd.kernels.ops.linear.tuning.tempfile.mkstemp", refused)  # root may write anywhere
    with caplog.at_level(logging.WARNING):
        table, timed, said = load(directory)
    assert len(timed) == len(table.choices) == NUM_CASES
    assert said == f"{NUM_CASES} choices measured, not kept"
    (record,) = caplog.records
    assert f"cannot be written to {directory} ([Errno" in record.getMessage()
    assert "XDG_CACHE_HOME" in record.getMessage()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("no room"), "too little memory to measure the fastest matrix products (no room)"),
        (RuntimeError("stream is capturing"), "the GPU failed to measure the fastest matrix products (stream is"),
    ],
)
def test_what_cannot_be_measured_is_left_to_the_rule(
    error: RuntimeError, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = Tuning.open(tmp_path, torch.bfloat16)
    assert found is not None

    def full() -> float:
        raise error

    known = cases(64, 32, "torch.bfloat16")
    found.table.offer(known[0], {FEW_ROWS: lambda: 2.0, LIBRARY: full})
    assert found.complete() == "chosen by a rule"
    assert words in caplog.records[0].getMessage()
    assert [found.table.choice(case) for case in known] == [FEW_ROWS] * 4 + [LIBRARY]
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_one_product_there_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "few_rows_refuse", few_rows_refuse)
    assert Tuning.open(tmp_path, torch.float32) is None
    monkeypatch.setattr("inferd.kernels.gpu.importlib.util.find_spec", lambda _: None)
    assert Tuning.open(tmp_path, torch.bfloat16) is None
