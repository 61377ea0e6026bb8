"""The table of fastest products: its choices, and that a damaged file does no harm."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from inferd.kernels.ops.linear import tuning
from inferd.kernels.ops.linear.tuning import BUCKETS, FEW_ROWS, LIBRARY, Case, Table, bucket, cases, read, write

CASE, OTHER = Case(8, 16, "bf16", 4), Case(8, 16, "bf16", 16)


def test_buckets() -> None:
    assert [bucket(num_rows) for num_rows in (0, 1, 2, 3, 4, 5, 16, 17)] == [1, 1, 2, 4, 4, 8, 16, None]
    assert [case.num_rows for case in cases(8, 16, "bf16")] == list(BUCKETS)
    names = {
        case.name for out in (1, 11) for size in (1, 11) for dtype in ("a", "b") for case in cases(out, size, dtype)
    }
    assert len(names) == 8 * len(BUCKETS)


def test_without_a_measurement_few_rows_are_few() -> None:
    table = Table("gpu")
    assert [table.choice(case) for case in cases(8, 16, "bf16")] == [FEW_ROWS] * 4 + [LIBRARY]


def test_the_fastest_is_chosen_and_kept(tmp_path: Path) -> None:
    table = Table("gpu")
    table.measure(CASE, {FEW_ROWS: lambda: 2.0, LIBRARY: lambda: 1.0})
    table.measure(OTHER, {FEW_ROWS: lambda: 1.0, LIBRARY: lambda: 1.0})
    assert (table.choice(CASE), table.choice(OTHER)) == (LIBRARY, FEW_ROWS)
    assert CASE not in table.missing(cases(8, 16, "bf16"))
    write(tmp_path / "deep", table)
    assert read(tmp_path / "deep", "gpu") == table
    assert read(tmp_path / "deep", "another gpu") == Table("another gpu")


def test_what_is_offered_is_measured_once_and_forgotten() -> None:
    table, measured = Table("gpu", {OTHER.name: LIBRARY}), []

    def seconds(name: str, taken: float) -> float:
        measured.append(name)
        return taken

    for layer in range(3):
        for case in (CASE, OTHER):
            name = f"{case.num_rows} rows, layer {layer}"
            table.offer(case, {FEW_ROWS: lambda n=name: seconds(n, 2.0), LIBRARY: lambda n=name: seconds(n, 1.0)})
    assert (table.choice(CASE), measured) == (FEW_ROWS, [])
    assert (table.complete(), table.complete()) == (1, 0)
    assert measured == ["4 rows, layer 0"] * 2
    assert table.choices == {OTHER.name: LIBRARY, CASE.name: LIBRARY}


def test_writing_keeps_what_others_measured(tmp_path: Path) -> None:
    write(tmp_path, Table("gpu", {CASE.name: LIBRARY}))
    write(tmp_path, Table("gpu", {OTHER.name: FEW_ROWS}))
    assert read(tmp_path, "gpu").choices == {CASE.name: LIBRARY, OTHER.name: FEW_ROWS}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff\xfe", b"[" * 5000, b'{"version": 1}',
        json.dumps({"version": tuning.VERSION + 1, "device": "gpu", "choices": {CASE.name: LIBRARY}}).encode(),
        json.dumps({"version": tuning.VERSION, "device": "other", "choices": {CASE.name: LIBRARY}}).encode(),
        json.dumps({"version": tuning.VERSION, "device": "gpu", "choices": [CASE.name]}).encode(),
        json.dumps({"version": tuning.VERSION, "device": "gpu", "choices": {CASE.name: ["x"]}}).encode(),
        json.dumps({"version": tuning.VERSION, "device": "gpu", "choices": {CASE.name: "os.system"}}).encode(),
        b" " * (2**20 + 1),
    ],
)  # fmt: skip
def test_a_file_that_is_not_ours_counts_as_empty_and_is_rewritten(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, Table("gpu"))
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert read(tmp_path, "gpu") == Table("gpu")
    write(tmp_path, Table("gpu", {CASE.name: LIBRARY}))
    assert read(tmp_path, "gpu").choices == {CASE.name: LIBRARY}
    assert list(tmp_path.iterdir()) == [file]


def test_readers_see_whole_files_while_many_write(tmp_path: Path) -> None:
    write(tmp_path, Table("gpu", {"seen": LIBRARY}))
    tables = [Table("gpu", {f"{writer} {entry}": FEW_ROWS for entry in range(50)}) for writer in range(8)]
    threads = [
        threading.Thread(target=lambda table=table: [write(tmp_path, table) for _ in range(5)]) for table in tables
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert read(tmp_path, "gpu").choices["seen"] == LIBRARY
    for thread in threads:
        thread.join()
    kept = read(tmp_path, "gpu").choices
    assert any(table.choices.items() <= kept.items() for table in tables)


def test_nothing_is_left_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="full"):
        write(tmp_path, Table("gpu"))
    assert list(tmp_path.iterdir()) == []
