"""A recorded test is left out only by a record of a full run without a failure, of the same content."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferd.kernels.cpu import library
from tests import conftest, records
from tests.arch.test_imports import imported
from tests.records import KERNELS, MODELS, RECORDS, ROOT, Record, read, write

AROUND = {"tests/conftest.py", "tests/records.py", "engine/api/process/garbage.py"}
"""Files that choose the tests and the folder of their caches. No result of a test depends on them."""
OTHER_PACKAGES = {
    "pytest", "hypothesis", "psutil", "pynvml", "huggingface_hub", "nvidia", "cuda", "cudnn", "flash_attn",
    "flash_attn_interface", "flashinfer",
}  # fmt: skip
"""Programs of the tests, a downloader, and libraries that are used on a GPU alone."""
PACKAGES = ("triton", "torch")
RECORD = Record("some", paths=("kernels", "tests/kernels"), packages=PACKAGES, folders=("tests/kernels",))

# -- digests -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with the two paths, and a record of them."""
    root = tmp_path / "root"
    for name in ("kernels/rope/triton.py", "kernels/gelu.py", "tests/kernels/test_rope.py", "server/main.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / ".gitignore").write_text("*.so\nbuild/\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    record(root)
    return root


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True)


def record(root: Path) -> Path:
    path, state = root / "record.txt", RECORD.current(root)
    assert state is not None and set(state) == {"kernels", "tests/kernels", *PACKAGES}
    write(path, state)
    return path


def test_the_same_content_is_the_same_whatever_else_there_is(root: Path) -> None:
    path, source = root / "record.txt", root / "kernels" / "gelu.py"
    assert RECORD.why_all(path, root) == ""
    content = source.read_text()
    source.unlink()
    source.write_text(content)
    os.utime(source, (1, 1))
    (root / "kernels" / "built.so").write_bytes(b"ignored")
    (root / "server" / "main.py").write_text("changed")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "committed or not")
    assert RECORD.why_all(path, root) == ""
    other = root.with_name("other")
    subprocess.run(["git", "clone", "--quiet", str(root), str(other)], check=True)
    assert RECORD.why_all(path, other) == "", "another checkout, made in another order"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda root: (root / "kernels/gelu.py").write_text("x"), "kernels"),
        (lambda root: (root / "kernels/gelu.py").unlink(), "kernels"),
        (lambda root: (root / "kernels/gelu.py").rename(root / "kernels/other.py"), "kernels"),
        (lambda root: (root / "tests/kernels/test_new.py").touch(), "tests/kernels"),
        (lambda root: [(root / f"{name}/new.py").touch() for name in ("kernels", "tests/kernels")],
         "kernels, tests/kernels"),
    ],
)  # fmt: skip
def test_any_other_content_is_named(root: Path, change: Callable[[Path], object], names: str) -> None:
    change(root)
    assert RECORD.why_all(root / "record.txt", root) == f"changed since record.txt was written: {names}"


def test_content_does_not_move_between_files_unseen(root: Path) -> None:
    """Names and lengths are part of the digest."""
    (root / "kernels/gelu.py").write_text("ab")
    (root / "kernels/h.py").write_text("c")
    path = record(root)
    (root / "kernels/gelu.py").write_text("a")
    (root / "kernels/h.py").write_text("bc")
    assert "kernels" in RECORD.why_all(path, root)


def test_another_version_or_path_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "record.txt"
    versions = {"triton": "9.9", "torch": "2.0+cpu"}
    monkeypatch.setattr(records.importlib.metadata, "version", lambda name: versions.get(name, "1"))
    assert set(PACKAGES) <= set(RECORD.why_all(path, root).replace(",", "").split())
    record(root)
    monkeypatch.setitem(versions, "torch", "2.0+cu130")
    assert RECORD.why_all(path, root) == "", "another build of the same version"
    fewer = replace(RECORD, paths=("kernels",))
    assert fewer.why_all(path, root) == "changed since record.txt was written: tests/kernels"


def test_another_processor_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, levels = root / "record.txt", ["avx512", "portable"]
    needy = replace(RECORD, needs_cpp=True)
    monkeypatch.setattr(library, "runnable_levels", lambda: tuple(levels))
    state = needy.current(root)
    assert state is not None
    write(path, state)
    assert needy.why_all(path, root) == ""
    del levels[0]
    assert needy.why_all(path, root) == "changed since record.txt was written: processor"


def test_a_record_of_another_processor_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FOLDER", root)
    monkeypatch.setattr(library, "runnable_levels", lambda: tuple(levels))
    levels, needy = ["avx512", "portable"], replace(RECORD, needs_cpp=True)
    assert needy.elsewhere(root) == "" and RECORD.file.name == "some_record.txt"
    state = needy.current(root)
    assert state is not None
    write(needy.file, state)
    del levels[0]
    assert needy.file.name == "some_record_portable.txt" and needy.why_all(root=root).endswith("is missing")
    assert needy.elsewhere(root) == "some_record_avx512.txt"
    (root / "kernels/gelu.py").write_text("changed")
    assert needy.elsewhere(root) == "", "of another content"


def test_all_run_without_a_record_or_without_git(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RECORD.why_all(root / "none.txt", root) == "none.txt is missing"
    (root / "empty.txt").touch()
    assert RECORD.why_all(root / "empty.txt", root).startswith("changed since empty.txt was written: kernels, ")
    monkeypatch.setenv("GIT_DIR", str(root / "nowhere"))
    assert RECORD.why_all(root / "record.txt", root) == "git does not list the files here"
    monkeypatch.setenv("PATH", "")
    assert RECORD.why_all(root / "record.txt", root) == "git does not list the files here"


# -- the record --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A stub of pytest: its exit code, and something that happens during the run."""
    how = SimpleNamespace(code=0, during=lambda: None)
    run = subprocess.run

    def stub(command: list[str], **options: Any) -> Any:
        if "pytest" not in command:
            return run(command, **options)
        assert command[1:] == ["-m", "pytest", "-q", *RECORD.folders, "--recorded", "some"]
        assert not [name for name in options["env"] if name.startswith("PYTEST_")]
        how.during()
        return subprocess.CompletedProcess(command, how.code)

    monkeypatch.setenv("PYTEST_ADDOPTS", "-k one")
    monkeypatch.setattr(subprocess, "run", stub)
    return how


def test_a_full_run_without_a_failure_is_recorded(root: Path, ends: SimpleNamespace) -> None:
    (root / "kernels/gelu.py").write_text("new")
    path = root / "record.txt"
    assert RECORD.why_all(path, root) != ""
    assert RECORD.run_and_write(path, root, workers=0) == 0
    assert read(path) == RECORD.current(root) and RECORD.why_all(path, root) == ""


@pytest.mark.parametrize("what", [1, 2, 5, "a changed file", "a missing package", "no compiler", "no git"])
def test_no_other_run_is_recorded(
    root: Path, ends: SimpleNamespace, what: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 is the code of a run that found no test, 2 of one that was stopped."""
    path, asked = root / "record.txt", RECORD
    (root / "kernels/gelu.py").write_text("new")
    before = path.read_text()
    if isinstance(what, int):
        ends.code = what
    elif what == "a changed file":
        ends.during = lambda: (root / "kernels/gelu.py").write_text("newer")
    elif what == "a missing package":
        asked = replace(RECORD, packages=(*PACKAGES, "not-installed"))
    elif what == "no compiler":
        asked = replace(RECORD, needs_cpp=True)
        monkeypatch.setattr(library, "has_compiler", lambda: False)
    else:
        monkeypatch.setenv("GIT_DIR", str(root / "nowhere"))
    assert asked.run_and_write(path, root, workers=0) == (what if isinstance(what, int) else 1)
    assert path.read_text() == before


# -- the choice --------------------------------------------------------------------------------------------------------


class Item:
    """A test in a file, with or without the marker."""

    def __init__(self, path: str, record: str | None, **options: int) -> None:
        self.path = Path(path)
        self.marker = None if record is None else SimpleNamespace(args=(record,), kwargs=options)

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        assert name == "recorded"
        return self.marker


def chosen(why: str, monkeypatch: pytest.MonkeyPatch, elsewhere: str = "", **options: str) -> tuple[list[int], str]:
    """The numbers of the tests that are left out, and what the report says."""
    items = [Item("a.py", "kernels" if number % 2 == 0 else None) for number in range(6)]
    items += [Item("b.py", "kernels"), Item("c.py", "kernels", keep=0)]
    items += [Item("d.py", "models", keep=2) for _ in range(4)]
    given = {"--device": "cpu", "--kernels": "cpp", "--recorded": None} | {
        f"--{name}": options[name] for name in options
    }
    config: Any = SimpleNamespace(getoption=given.__getitem__, stash={})
    monkeypatch.setattr(Record, "why_all", lambda self: why if self is KERNELS else "")
    monkeypatch.setattr(Record, "elsewhere", lambda self: elsewhere if self is KERNELS else "")
    left_out: Any = conftest._left_out(config, items)  # type: ignore[arg-type]
    return [number for number, item in enumerate(items) if item in left_out], config.stash.get(conftest.RECORDED, "")


def test_some_of_a_file_stay_and_all_that_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out, told = chosen("", monkeypatch)
    assert len(left_out) == 5 and 7 in left_out and set(left_out) < {0, 2, 4, 7, 8, 9, 10, 11}
    assert "of kernels: 2 of 5, because nothing that they are made of has changed" in told
    assert "of models: 2 of 4, because" in told
    assert chosen("", monkeypatch) == (left_out, told), "always the same ones"


def test_a_reason_keeps_all_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out, told = chosen("kernels differ", monkeypatch)
    assert len(left_out) == 2 and set(left_out) < {8, 9, 10, 11}, "the other record is up to date"
    assert "of kernels: all 5, because kernels differ" in told
    for options in ({"device": "cuda"}, {"kernels": "reference"}):
        left_out, told = chosen("", monkeypatch, **options)
        assert left_out == [] and "because the record is of runs without --device and --kernels" in told
    left_out, told = chosen("the processor", monkeypatch, elsewhere="x.txt")
    assert len(left_out) == 4 and 7 not in left_out, "one of each file"
    assert "of kernels: 3 of 5, because x.txt is of another processor" in told
    monkeypatch.setattr(conftest, "PART_ELSEWHERE", 0.6)
    assert len(chosen("the processor", monkeypatch, elsewhere="x.txt")[0]) == 3, "two of three"
    left_out, told = chosen("", monkeypatch, elsewhere="x.txt", device="cuda")
    assert left_out == [] and "--device" in told
    assert chosen("", monkeypatch, recorded="kernels") == ([1, 3, 5, 8, 9, 10, 11], ""), "a run that records takes all"


# -- what they are made of ---------------------------------------------------------------------------------------------


def recorded_files(record: Record) -> list[Path]:
    files = [path for folder in record.folders for path in (ROOT / folder).glob("test_*.py")]
    marked = [path for path in files if f'mark.recorded("{record.name}"' in path.read_text()]
    if record is MODELS:
        files = (ROOT / "tests/cpu").glob("test_*.py")
        return marked + [path for path in files if "\nIS_RECORDED = False\n" not in path.read_text()]
    found = marked + list((ROOT / "tests" / "aot").glob("test_*.py"))
    for path in (ROOT / "tests" / "kernels").glob("test_*.py"):
        text = path.read_text()
        is_interpreted = any(word in text for word in ('"implementation"', "implementation:", "def interpreted"))
        is_interpreted |= path.stem.endswith("_triton")
        if is_interpreted and "\nIS_RECORDED = False\n" not in text:
            found.append(path)
    return found


def file_of(name: str) -> Path | None:
    """The file of a module of the repository, or of the module that has this name in it."""
    parts = name.removeprefix("inferd.").split(".")
    if parts[0] not in ("server", "engine", "kernels", "tests", "benchmarks", "examples"):
        return None
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def outside(files: list[Path], record: Record) -> set[str]:
    """Files and libraries that these import, directly or not, and that the record does not cover."""
    seen, found = set[Path](), set[str]()
    files = list(files)
    while files:
        path = files.pop()
        name = str(path.relative_to(ROOT))
        if path in seen or name in AROUND:
            continue
        seen.add(path)
        if not any(name == covered or name.startswith(f"{covered}/") for covered in record.paths):
            found.add(name)
        for module in imported(path):
            file, top = file_of(module), module.split(".")[0]
            if file is not None:
                files.append(file)
            elif top not in sys.stdlib_module_names | {"inferd", "tests", *imports_of(record), *OTHER_PACKAGES}:
                found.add(top)
    return found


def imports_of(record: Record) -> set[str]:
    return {"zmq" if package == "pyzmq" else package for package in record.packages}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_recorded_tests_import_only_what_the_record_covers(record: Record) -> None:
    files = recorded_files(record)
    expected = {
        "kernels": {"test_rope", "test_linear", "test_judge", "test_gpu_runner"},
        "models": {"test_parity", "test_decoder_kernels", "test_host_time", "test_gpu_dry"},
    }
    assert expected[record.name] <= {path.stem for path in files}
    if record is MODELS:  # tests run these as programs
        files += [ROOT / "benchmarks/host_time.py", ROOT / "benchmarks/gpu/child.py"]
    assert outside(files, record) == set(), "tests of files that import these may not be recorded: IS_RECORDED = False"


def test_others_are_seen_to_import_more() -> None:
    others = {ROOT / "tests" / "kernels" / "test_kv_format.py", ROOT / "tests" / "cpu" / "test_memory.py"}
    assert not others & set(recorded_files(KERNELS))
    assert all(any(name.startswith("engine/") for name in outside([path], KERNELS)) for path in others)
    other = ROOT / "tests" / "cpu" / "test_over_http.py"
    assert other not in recorded_files(MODELS) and outside([other], MODELS) != set()
