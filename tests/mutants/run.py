"""Makes small mistakes in the code and lists those that the unit tests miss: `make mutants`.

mutmut's operators write the mutants (`write.py`, in an environment of its own). Here each mutant runs in its own
process against the unit tests that import its file, until one fails. mutmut itself names modules by path and cannot
find `inferd.server.dispatch.router`. cosmic-ray has one test command for all files, no sample and no time limit. A
mutant exists in memory only. Prints the score by file and writes the survivors to build/mutants/report.md.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Literal

import hypothesis
import pytest
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOME = ROOT / "build" / "mutants"
TARGETS = (
    "server/generate/*.py", "server/auth/quotas.py", "server/dispatch/*.py", "server/supervision/supervisor.py",
    "engine/sched/**/*.py", "engine/cache/*.py",
)  # fmt: skip
TESTS = ("unit", "property")
ROOMS = ("server", "engine", "kernels")
HEAVY = (
    "msgspec",
    "orjson",
    "pydantic",
    "fastapi",
    "httpx",
    "uvicorn",
    "zmq",
    "prometheus_client",
)
"""Libraries that are imported once, before processes are forked."""
UNCHANGED_S = 300.0
"""Most seconds for the tests of one unchanged file."""
SLACK_S = 10.0
"""Seconds in addition to three times the unchanged file's, after which a mutant counts as endless."""

Outcome = Literal["killed", "survived", "too long"]


@dataclass(frozen=True, slots=True)
class Mutant:
    file: Path
    line: int
    diff: tuple[str, ...]
    source: str

    @property
    def module(self) -> str:
        return "inferd." + ".".join(self.file.relative_to(ROOT).with_suffix("").parts)


def main() -> int:
    options = _options()
    files = sorted(path for pattern in TARGETS for path in ROOT.glob(pattern) if path.name != "__init__.py")
    files = [path for path in files if not options.only or str(path.relative_to(ROOT)) in options.only]
    mutants, num_found = _written(files, options.seed, options.most)
    print(f"seed {options.seed}: {len(mutants)} of {num_found} mutants in {len(files)} files", flush=True)
    outcomes, broken = judge(mutants, options.minutes * 60, options.processes)
    _report(outcomes, options.seed, num_found)
    for name in broken:
        print(f"FAILED: the tests of the unchanged {name} do not pass: its mutants were not judged")
    return int(bool(broken) or not outcomes)


# -- which tests -------------------------------------------------------------------------------------------------------


def tests_of(file: Path) -> list[Path]:
    """The unit tests that import `file`; if there are none, those that import its importers, and so on."""
    level, seen = {file}, {file}
    while level:
        tests = [path for folder in TESTS for path in (ROOT / "tests" / folder).glob("test_*.py")]
        found = [test for test in tests if level & _imported(test)]
        if found:
            return sorted(found, key=lambda test: (test.stem != f"test_{file.stem}", test))
        sources = {path for room in ROOMS for path in (ROOT / room).rglob("*.py")}
        level = {path for path in sources - seen if level & _imported(path)}
        seen |= level
    return []


_IMPORTED: dict[Path, set[Path]] = {}


def _imported(path: Path) -> set[Path]:
    """The source files that a file imports."""
    if path not in _IMPORTED:
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        ours = (name.removeprefix("inferd.").replace(".", "/") for name in names if name.startswith("inferd."))
        _IMPORTED[path] = {ROOT / f"{name}.py" for name in ours}
    return _IMPORTED[path]


# -- running -----------------------------------------------------------------------------------------------------------


def judge(
    mutants: Sequence[Mutant], limit_s: float, num_processes: int
) -> tuple[list[tuple[Mutant, Outcome]], list[str]]:
    """(outcome of each mutant that started before `limit_s`, files whose tests fail unchanged)."""
    deadline_s = time.monotonic() + limit_s
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for name in HEAVY:
        importlib.import_module(name)
    tests = {file: tuple(tests_of(file)) for file in {mutant.file for mutant in mutants}}
    unchanged = [_Job(files, None, UNCHANGED_S) for files in sorted(set(tests.values()))]
    done = _progress("unchanged", unchanged, deadline_s, num_processes)
    took_s = {one.job.tests: one.took_s for one in done if one.outcome == "survived"}
    failed = {one.job.tests for one in done} - took_s.keys()
    jobs = [
        _Job(tests[mutant.file], mutant, 3 * took_s[tests[mutant.file]] + SLACK_S)
        for mutant in mutants
        if tests[mutant.file] in took_s
    ]
    done = _progress("mutants", jobs, deadline_s, num_processes)
    outcomes = [(one.job.mutant, one.outcome) for one in done if one.job.mutant is not None]
    return outcomes, sorted(str(file.relative_to(ROOT)) for file, files in tests.items() if files in failed)


@dataclass(frozen=True, slots=True)
class _Job:
    tests: tuple[Path, ...]
    mutant: Mutant | None
    limit_s: float


@dataclass(frozen=True, slots=True)
class _Done:
    job: _Job
    outcome: Outcome
    took_s: float


def _progress(name: str, jobs: Sequence[_Job], deadline_s: float, num_processes: int) -> list[_Done]:
    """Run the jobs and show how many are done and how many mutants survived."""
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    )
    found = list[_Done]()
    with Progress(*columns, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(jobs), said="")
        for done in _pool(jobs, deadline_s, num_processes):
            found.append(done)
            said = f"{sum(one.outcome == 'survived' for one in found)} survived"
            progress.update(task, advance=1, said=said, refresh=True)
    return found


def _pool(jobs: Sequence[_Job], deadline_s: float, num_processes: int) -> Iterator[_Done]:
    """Run each job in its own process, a limited number at once. None starts after the deadline."""
    waiting, running = list(reversed(jobs)), dict[int, tuple[_Job, float]]()
    while running or (waiting and time.monotonic() < deadline_s):
        while waiting and len(running) < num_processes and time.monotonic() < deadline_s:
            job = waiting.pop()
            running[_started(job)] = job, time.monotonic()
        for child, (job, started_s) in list(running.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            took_s = time.monotonic() - started_s
            if not done and took_s <= job.limit_s:
                continue
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # also ends processes that its tests started
            if not done:
                os.waitpid(child, 0)
            del running[child]
            is_killed = bool(done) and os.waitstatus_to_exitcode(status) != 0
            yield _Done(job, "killed" if is_killed else "survived" if done else "too long", took_s)
        time.sleep(0.02)


def _started(job: _Job) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            status = _run(job)
        finally:
            os._exit(status)
    return child


def _run(job: _Job) -> int:
    """pytest's exit status, in the job's own process. Without tests for the file every mutant survives."""
    if not job.tests:
        return 0
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silent, descriptor)
    if job.mutant is not None:
        sys.meta_path.insert(0, _Mutated(job.mutant))
    # The same examples each time; no deadline, because slowness must not count as a kill.
    hypothesis.settings.register_profile("mutants", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("mutants")
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *map(str, job.tests)]))


class _Mutated(MetaPathFinder):
    """Gives one module another source."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != self._mutant.module:
            return None
        loader = _Loader(name, str(self._mutant.file), self._mutant.source)
        return spec_from_file_location(name, self._mutant.file, loader=loader)


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


# -- mutants and reports -----------------------------------------------------------------------------------------------


def _written(files: Sequence[Path], seed: str, most: int) -> tuple[list[Mutant], int]:
    command = [_environment(), HERE / "write.py", "--seed", seed, "--most", str(most), *files]
    first, *lines = subprocess.run(command, cwd=HOME, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    mutants = [
        Mutant(Path(one["file"]), one["line"], tuple(one["diff"]), one["source"]) for one in map(json.loads, lines)
    ]
    return mutants, json.loads(first)["num_found"]


def _environment() -> Path:
    """The Python of an environment with mutmut, made again if its requirements have changed."""
    requirements = HERE / "requirements.txt"
    digest, stamp, venv = hashlib.sha256(requirements.read_bytes()).hexdigest(), HOME / ".installed", HOME / "venv"
    if not stamp.exists() or stamp.read_text() != digest:
        print(f"installing into {venv.relative_to(ROOT)} (once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        pip = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", requirements], check=True)
        (HOME / "setup.cfg").write_text("[mutmut]\nsource_paths = .\n")
        stamp.write_text(digest)
    return venv / "bin/python"


def _report(outcomes: Sequence[tuple[Mutant, Outcome]], seed: str, num_found: int) -> None:
    by_file: dict[str, list[Outcome]] = defaultdict(list)
    for mutant, outcome in outcomes:
        by_file[str(mutant.file.relative_to(ROOT))].append(outcome)
    lines = ["| file | mutants | killed | survived | score |", "| --- | --- | --- | --- | --- |"]
    for name, seen in [*sorted(by_file.items()), ("all", [outcome for _, outcome in outcomes])]:
        num_survived = seen.count("survived")
        score = 1 - num_survived / max(1, len(seen))
        lines.append(f"| {name} | {len(seen)} | {len(seen) - num_survived} | {num_survived} | {score:.0%} |")
    survivors = sorted(
        (one for one, outcome in outcomes if outcome == "survived"), key=lambda one: (one.file, one.line)
    )
    details = [
        f"## {one.file.relative_to(ROOT)}:{one.line}\n\n```diff\n" + "\n".join(one.diff) + "\n```\n"
        for one in survivors
    ]
    table = "\n".join(lines)
    HOME.mkdir(parents=True, exist_ok=True)
    head = f"{len(outcomes)} of {num_found} mutants, seed {seed}. A mutant that runs in circles is killed.\n"
    (HOME / "report.md").write_text("\n".join(["# Mutants\n", head, table, "", *details]))
    print(f"{table}\n\nthe survivors: {(HOME / 'report.md').relative_to(ROOT)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="0", help="of the sample, and of the order in which mutants run")
    parser.add_argument("--most", type=int, default=200, help="mutants at most")
    parser.add_argument("--minutes", type=float, default=10.0, help="none is begun after so long")
    parser.add_argument(
        "--only", action="append", metavar="FILE", help="such as server/dispatch/router.py; may be given again"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
