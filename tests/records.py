"""Says whether anything has changed that slow tests of kernels and of models are made of.

These tests take minutes, and most commits change nothing that could change their results. The marker `recorded` is for
tests that depend on the files and the versions of one `Record` alone: `tests/unit/test_records` judges that by their
imports. The record's file holds the digest of each path as it was in the last full run without a failure. While all
digests and versions are the same, `make test` runs a few recorded tests of each file. Otherwise, or without the file,
it runs all of them.

`make records` runs this program, which alone writes these files: each after a run of all its tests that it started
itself, in which none failed, and during which no file changed. Records that are up to date are left as they are.

Results of the C++ kernels are those of a processor, so such a record has a file for each kind of processor. If only
that of another kind is up to date, `make test` runs a part of the recorded tests (`conftest.PART_ELSEWHERE`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests"
"""Folder of the records."""


@dataclass(frozen=True, slots=True)
class Record:
    """Some slow tests, and all that their results depend on."""

    name: str
    paths: tuple[str, ...]
    packages: tuple[str, ...]
    folders: tuple[str, ...]
    """Folders with these tests."""
    needs_cpp: bool = False
    """Whether results are those of the C++ kernels, in the forms that this processor runs."""

    @property
    def file(self) -> Path:
        """The record of this kind of processor."""
        kind = f"_{_levels()[0]}" if self.needs_cpp else ""
        return FOLDER / f"{self.name}_record{kind}.txt"

    def current(self, root: Path = ROOT) -> dict[str, str] | None:
        """The digest of each path, and the version of each package. None if git cannot say which files there are."""
        found = {path: _digest(root, path) for path in self.paths}
        versions = {package: _version(package) for package in self.packages}
        built = _kernels() if self.needs_cpp else {}
        named = {name: value for name, value in found.items() if value is not None}
        return {**named, **versions, **built} if len(named) == len(found) else None

    def why_all(self, file: Path | None = None, root: Path = ROOT) -> str:
        """The reason why all of these tests have to run. Empty if a few of each file are enough."""
        file = file or self.file
        if not file.exists():
            return f"{file.name} is missing"
        recorded, now = read(file), self.current(root)
        if now is None:
            return "git does not list the files here"
        changed = [name for name in sorted(recorded.keys() | now) if recorded.get(name) != now.get(name)]
        return f"changed since {file.name} was written: {', '.join(changed)}" if changed else ""

    def elsewhere(self, root: Path = ROOT) -> str:
        """The name of a record that only the processor tells from this content; empty if there is none."""
        if not self.needs_cpp:
            return ""
        now = self.current(root) or {}
        for file in sorted(FOLDER.glob(f"{self.name}_record_*.txt")):
            if now and {**read(file), "processor": now["processor"]} == now:
                return file.name
        return ""

    def run_and_write(self, file: Path | None = None, root: Path = ROOT, workers: int = 2) -> int:
        """Run all of these tests, and write the record if they passed. Returns the exit code of pytest, or 1."""
        file = file or self.file
        before = self.current(root)
        command = [sys.executable, "-m", "pytest", "-q", *self.folders, "--recorded", self.name]
        if workers:
            command += ["-n", str(workers), "--dist", "worksteal", "--no-loadscope-reorder"]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        # Options of the caller's environment could leave tests out.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        code = subprocess.run(command, cwd=root, env={**environment, **threads}, check=False).returncode
        after = self.current(root)
        if code:
            print(f"{file.name} is not written: pytest ended with {code}", file=sys.stderr)
        elif before is None or after is None:
            print(f"{file.name} is not written: git does not list the files here", file=sys.stderr)
        elif "missing" in after.values():
            missing = ", ".join(name for name, value in after.items() if value == "missing")
            print(f"{file.name} is not written: install {missing}", file=sys.stderr)
        elif before != after:
            print(f"{file.name} is not written: files changed during the run", file=sys.stderr)
        else:
            write(file, after)
            print(f"{file.name} is written: commit it")
            return 0
        return code or 1


KERNELS = Record(
    "kernels",
    paths=(
        "kernels", "benchmarks/gpu", "benchmarks/tables.py", "benchmarks/results/compiled.json",
        "benchmarks/results/compiled_oldest.json", "tests/kernels", "tests/aot", "tests/benchmarks/test_gpu_dry.py",
        "tests/benchmarks/test_gpu_runner.py",
    ),
    packages=("triton", "torch", "numpy", "transformers"),
    folders=("tests/kernels", "tests/aot", "tests/benchmarks"),
)  # fmt: skip
"""Interpreted Triton, kernels compiled for GPUs, and the driver of GPU rows."""
MODELS = Record(
    "models",
    paths=(
        "kernels", "engine", "benchmarks/gpu", "benchmarks/quality", "benchmarks/checkpoints.py",
        "benchmarks/host_time.py", "benchmarks/tables.py", "examples/tiny", "tests/cpu", "tests/kernels",
        "tests/configs.py", "tests/benchmarks/test_gpu_dry.py", "tests/benchmarks/test_host_time.py",
    ),
    packages=(
        "torch", "triton", "transformers", "tokenizers", "safetensors", "llguidance", "numpy", "msgspec", "pyzmq",
        "xxhash",
    ),
    folders=("tests/cpu", "tests/kernels", "tests/benchmarks"),
    needs_cpp=True,
)  # fmt: skip
"""Models, the worker and the engine on this processor, also on the kernels of GPUs, interpreted."""
RECORDS = {record.name: record for record in (KERNELS, MODELS)}


def read(file: Path) -> dict[str, str]:
    lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {words[0]: words[1] for words in lines if len(words) == 2}


def write(file: Path, state: dict[str, str]) -> None:
    heading = "# Written by `make records` after a full run without a failure, and never by hand: see records.py.\n"
    file.write_text(heading + "".join(f"{name} {value}\n" for name, value in state.items()), encoding="utf-8")


def main(names: list[str]) -> int:
    """Write the named records, or all, as far as they are not up to date."""
    worst = 0
    for record in [RECORDS[name] for name in names] or RECORDS.values():
        why = record.why_all()
        print(f"{record.file.name}: {why or 'up to date'}", flush=True)
        if why:
            worst = record.run_and_write() or worst
    return worst


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


def _kernels() -> dict[str, str]:
    """Says whether a compiler is there, and which forms of the C++ kernels this processor can run."""
    from inferd.kernels.cpu import library  # noqa: PLC0415

    return {"processor": ",".join(_levels()), "compiler": "there" if library.has_compiler() else "missing"}


def _levels() -> tuple[str, ...]:
    """The forms of the C++ kernels that this processor can run, the best one first."""
    # Every run of pytest imports this file, and few need torch.
    from inferd.kernels.cpu import library  # noqa: PLC0415

    return library.runnable_levels()


def _version(package: str) -> str:
    """Without the name of a build, such as `+cpu`: the tests use no other device."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
