"""`inferd kv` shows, checks and clears a directory of KV segments."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from inferd.engine.api.errors import StartError
from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.server.commands.app import app
from tests.unit.kv_samples import FILE_BYTES, PLENTY, is_there, listing_of, path_of, segment, use_at, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three segments of one tenant, one of another, and one of another model."""
    root = tmp_path / "kv"
    directory = KVDirectory(root, PLENTY)
    for number, some in enumerate(SEGMENTS):
        write(directory, some)
        use_at(root, some, 1_800_000_000 + 86400 * number)
    directory.close()
    return root


SEGMENTS = (segment(0), segment(1), segment(2), segment(0, tenant=1), segment(0, model=1))


def kv(*line: str | Path, answer: str = "") -> Result:
    return CliRunner().invoke(app, ["kv", *map(str, line)], input=answer, env={"COLUMNS": "130", "TZ": "UTC"})


def foreign(root: Path) -> Sequence[Path]:
    paths = (root / "letter.txt", path_of(root, segment()).with_suffix(".bak"))
    for path in paths:
        path.write_bytes(b"mine")
    return paths


def test_the_list_has_a_line_for_each_tenant_of_a_model(root: Path) -> None:
    done = kv("ls", root)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.exit_code == 0
    first, second = segment(), segment(model=1)
    assert [line[:3] for line in lines[1:-1]] == [
        [first.fingerprint.hex()[:16], first.tenant.hex(), "3"],
        *sorted(
            [
                [first.fingerprint.hex()[:16], segment(tenant=1).tenant.hex(), "1"],
                [second.fingerprint.hex()[:16], second.tenant.hex(), "1"],
            ]
        ),
    ]
    assert lines[1][4:] == ["2027-01-15", "08:00", "2027-01-17", "08:00"]
    assert done.stdout.splitlines()[-1] == f"5 segments, 0.0 MiB in {root}"


def test_the_list_as_json(root: Path) -> None:
    foreign(root)
    (path_of(root, segment()).parent / f"{segment().key.hex()}.kv.{'0' * 16}.part").write_bytes(b"half")
    found = json.loads(kv("ls", root, "--json").stdout)
    assert found["groups"][0] == {
        "fingerprint": segment().fingerprint.hex(),
        "tenant": segment().tenant.hex(),
        "num_files": 3,
        "num_bytes": 3 * FILE_BYTES,
        "oldest_use_s": 1_800_000_000,
        "newest_use_s": 1_800_172_800,
    }
    assert len(found["groups"]) == 3
    assert (len(found["parts"]), len(found["foreign"])) == (1, 2)


def test_the_list_tells_what_is_not_a_segment(root: Path) -> None:
    foreign(root)
    (root / "\x1b[2Jletter").write_bytes(b"mine")
    part = path_of(root, segment()).parent / f"{segment().key.hex()}.kv.{'0' * 16}.part"
    part.write_bytes(b"half")
    os.utime(part, (0, 0))
    told = kv("ls", root).stdout
    assert "1 parts of segments, 1 of them left by processes that were killed" in told
    assert "not inferd's, left alone: letter.txt\n" in told
    assert f"not inferd's, left alone: {path_of(root, segment()).with_suffix('.bak').relative_to(root)}\n" in told
    assert "left alone: '\\x1b[2Jletter'\n" in told


def test_an_empty_directory_has_no_table(tmp_path: Path) -> None:
    KVDirectory(tmp_path / "kv", PLENTY).close()
    assert kv("ls", tmp_path / "kv").stdout == f"0 segments, 0.0 MiB in {tmp_path / 'kv'}\n"
    assert kv("verify", tmp_path / "kv").stdout == "0 segments are sound, 0 damaged\n"


def test_sound_segments_are_verified(root: Path) -> None:
    done = kv("verify", root)
    assert (done.exit_code, done.stdout) == (0, "5 segments are sound, 0 damaged\n")


def test_each_damaged_segment_is_named_and_the_exit_code_is_1(root: Path) -> None:
    damaged = path_of(root, segment(1))
    os.truncate(damaged, 30)
    done = kv("verify", root)
    name = damaged.relative_to(root)
    expected = f"{name}: it has 30 bytes, which is too short\n4 segments are sound, 1 damaged\n"
    assert (done.exit_code, done.stdout) == (1, expected)
    done = kv("verify", root, "--json")
    expected_json = {
        "num_sound": 4,
        "damaged": {str(name): "it has 30 bytes, which is too short"},
        "parts": [],
        "foreign": [],
    }
    assert (done.exit_code, json.loads(done.stdout)) == (1, expected_json)
    assert damaged.exists()


@pytest.mark.parametrize(("line", "answer"), [(["--yes"], ""), ([], "y\n")])
def test_clearing_removes_all_segments_and_nothing_else(root: Path, line: list[str], answer: str) -> None:
    paths = foreign(root)
    done = kv("clear", root, *line, answer=answer)
    assert done.exit_code == 0
    assert "removed 5 segments, 0.0 MiB\n" in done.stdout
    assert done.stdout.count("not inferd's, left alone: ") == 2
    assert all(path.read_bytes() == b"mine" for path in paths)
    assert listing_of(root).segments == []
    directory = KVDirectory(root, PLENTY)
    assert not is_there(directory, segment())
    directory.close()


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_clearing_asks_first(root: Path, answer: str) -> None:
    done = kv("clear", root, answer=answer)
    assert done.exit_code == 1
    assert f"Remove 5 segments, 0.0 MiB from {root}? [y/N]" in done.stdout
    assert len(listing_of(root).segments) == 5


@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
def test_a_directory_of_something_else_is_refused(tmp_path: Path, command: str) -> None:
    (tmp_path / "letter.txt").write_bytes(b"mine")
    done = kv(command, tmp_path)
    assert isinstance(done.exception, StartError)
    assert "must have the file inferd-kv.json" in str(done.exception)
