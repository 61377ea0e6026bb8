"""Says whether anything has changed that the tests of Triton kernels and of the driver of GPU rows are made of.

These tests take minutes, and most commits change nothing that could change their results. The marker `recorded` is for
tests that depend on the files of `PATHS` and the versions of `PACKAGES` alone: `tests/unit/test_kernels_record` judges
that by their imports. `tests/kernels_record.txt` holds the digest of each path as it was in the last full run without a
failure. While all digests and versions are the same, `make test` runs one recorded test of each file. Otherwise, or
without the record, it runs all of them.

`make kernels` runs this program, which alone writes the record: after a run of all recorded tests that it started
itself, in which none failed, and during which no file changed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".txt")
PATHS = (
    "kernels", "benchmarks/gpu", "benchmarks/tables.py", "benchmarks/results/compiled.json",
    "benchmarks/results/compiled_oldest.json", "tests/kernels", "tests/aot", "tests/benchmarks/test_gpu_dry.py",
    "tests/benchmarks/test_gpu_runner.py",
)  # fmt: skip
PACKAGES = ("triton", "torch", "numpy", "transformers")
FOLDERS = ("tests/kernels", "tests/aot", "tests/benchmarks")
"""Folders with recorded tests."""
_HEADING = "# Written by `make kernels` after a full run without a failure, and never by hand: see kernels_record.py.\n"


def current(root: Path = ROOT) -> dict[str, str] | None:
    """The digest of each path, and the version of each package. None if git cannot say which files there are."""
    found = {path: _digest(root, path) for path in PATHS}
    versions = {package: _version(package) for package in PACKAGES}
    named = {name: value for name, value in found.items() if value is not None}
    return {**named, **versions} if len(named) == len(found) else None


def why_all(record: Path = RECORD, root: Path = ROOT) -> str:
    """The reason why all recorded tests have to run. Empty if one a file is enough."""
    if not record.exists():
        return f"{record.name} is missing"
    recorded, now = read(record), current(root)
    if now is None:
        return "git does not list the files here"
    changed = [name for name in sorted(recorded.keys() | now) if recorded.get(name) != now.get(name)]
    return f"changed since {record.name} was written: {', '.join(changed)}" if changed else ""


def read(record: Path) -> dict[str, str]:
    lines = [line.split() for line in record.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {words[0]: words[1] for words in lines if len(words) == 2}


def write(record: Path, state: dict[str, str]) -> None:
    record.write_text(_HEADING + "".join(f"{name} {value}\n" for name, value in state.items()), encoding="utf-8")


def run_and_record(record: Path = RECORD, root: Path = ROOT, workers: int = 2) -> int:
    """Run all recorded tests, and write the record if they passed. Returns the exit code of pytest, or 1."""
    before = current(root)
    command = [sys.executable, "-m", "pytest", "-q", *FOLDERS, "--recorded"]
    if workers:
        command += ["-n", str(workers), "--dist", "worksteal", "--no-loadscope-reorder"]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    # Options of the caller's environment could leave tests out.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    code = subprocess.run(command, cwd=root, env={**environment, **threads}, check=False).returncode
    after = current(root)
    if code:
        print(f"{record.name} is not written: pytest ended with {code}", file=sys.stderr)
    elif before is None or after is None:
        print(f"{record.name} is not written: git does not list the files here", file=sys.stderr)
    elif "missing" in after.values():
        print(f"{record.name} is not written: {', '.join(PACKAGES)} must all be installed", file=sys.stderr)
    elif before != after:
        print(f"{record.name} is not written: files changed during the run", file=sys.stderr)
    else:
        write(record, after)
        print(f"{record.name} is written: commit it")
        return 0
    return code or 1


def _digest(root: Path, path: str) -> str | None:
    """Digest of the names and the content of all files that git does not ignore, in the order of their names."""
    files = _files(root, path)
    if files is None:
        return None
    found = hashlib.sha256()
    for name in files:
        content = (root / name).read_bytes()
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:32]


def _files(root: Path, path: str) -> Iterable[str] | None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", path]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    # A tracked file may have been removed. One with a conflict is listed more than once.
    names = sorted({name for name in listed.stdout.split("\0") if (root / name).is_file()})
    return names if listed.returncode == 0 and names else None


def _version(package: str) -> str:
    """Without the name of a build, such as `+cpu`: the tests use no other device."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(run_and_record())
