"""Runs rows, each in a process of its own with a time limit, and stores each result as soon as the row ends.

A hang or a crash affects only its row: it is recorded with the end of its output. Its earlier points stay, because each
was checked separately. The next call runs the rows without a result. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.points import Point
from benchmarks.gpu.tree import ROOT, environment, make_tree

Status = Literal["ok", "wrong", "failed", "timed out", "skipped"]
SKIPPED = 77
"""Exit code of a row that cannot run on this machine; the last line of its file gives the reason."""
_TAIL_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Row:
    """One named measurement or check."""

    part: str
    name: str
    target: str
    """`module:function` under `benchmarks.gpu`, which gets a `Bench`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 120.0
    is_timed: bool = True
    """Whether it needs the machine to itself; other rows may run side by side."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of its process."""

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}"

    @property
    def file_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.key)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a row."""

    key: str
    status: Status
    took_s: float
    at: str
    """UTC time, to the second."""
    points: tuple[Point, ...] = ()
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "row": self.key,
            "status": self.status,
            "took_s": round(self.took_s, 2),
            "at": self.at,
            "reason": self.reason,
            "points": [point.as_json() for point in self.points],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Result:
        points = tuple(map(Point.from_json, value["points"]))
        return cls(value["row"], value["status"], value["took_s"], value["at"], points, value["reason"])


def child_command(row: Row, into: Path, options: Options) -> list[str]:
    """The command that runs a row: `child.py`, which writes points to `into`."""
    asked = {"target": row.target, "arguments": dict(row.arguments), "device": options.device}
    command = [sys.executable, "-P", "-m", "benchmarks.gpu.child", "--into", str(into), json.dumps(asked)]
    return [*command, *(["--rehearse"] * options.is_rehearsal)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options for running rows."""

    device: str = "cuda"
    is_rehearsal: bool = False
    """Tiny cases, which show that everything runs and measure nothing."""
    is_again: bool = False
    """Whether rows that have a result run again."""
    budget_s: float = 480.0
    """Rows that could not start within it are left for the next call. None exceeds it by more than its grace period."""
    jobs: int = 1
    """Rows without timing that run side by side."""
    work_dir: Path = ROOT / "build" / "gpu"
    """Logs and points of running rows."""
    command: Callable[[Row, Path, Options], list[str]] = child_command


class Results:
    """The file of results: a line for each run of a row, of which the last counts."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[str, Result]:
        """Results by key. An incomplete last line is ignored."""
        found: dict[str, Result] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    result = Result.from_json(json.loads(line))
                except json.JSONDecodeError:
                    continue
                found[result.key] = result
        return found

    def append(self, result: Result) -> None:
        with self._lock, self._path.open("a") as file:
            if file.tell() and not self._path.read_bytes().endswith(b"\n"):
                file.write("\n")
            file.write(json.dumps(result.as_json()) + "\n")


def run_rows(
    rows: Sequence[Row], results: Results, options: Options, say: Callable[[str], None]
) -> tuple[list[Result], list[Row]]:
    """(results of the rows that ran, rows left for lack of time). Timed rows run one after another, in order. Rows
    between them run `options.jobs` at a time."""
    until_s = time.monotonic() + options.budget_s
    known = {} if options.is_again else results.read()
    todo = [row for row in rows if row.key not in known]
    done: list[Result] = []
    left: list[Row] = []

    def one(row: Row) -> None:
        remaining_s = until_s - time.monotonic()
        if remaining_s <= 0:
            left.append(row)
            say(f"{row.key}: left, the time is up")
            return
        result = run_row(row, options, min(row.timeout_s, max(remaining_s, 10.0)))
        results.append(result)
        done.append(result)
        say(progress(result))

    for row in rows:
        if row.key in known:
            say(f"{row.key}: has a result ({known[row.key].status})")
    for group in _groups(todo):
        with ThreadPoolExecutor(1 if group[0].is_timed else options.jobs) as pool:
            list(pool.map(one, group))
    return done, left


def _groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Consecutive rows that may run side by side, or a timed row alone."""
    groups: list[list[Row]] = []
    for row in rows:
        if groups and groups[-1][0].is_timed == row.is_timed:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def run_row(row: Row, options: Options, timeout_s: float) -> Result:
    """Run it now, even if it has a result."""
    folder = options.work_dir / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    into, log = folder / f"{row.file_name}.points", folder / f"{row.file_name}.log"
    into.unlink(missing_ok=True)
    started_s = time.monotonic()
    code = _run(options.command(row, into, options), row, log, timeout_s)
    points, skipped = _read_points(into)
    status, reason = _judge(code, points, skipped, log, timeout_s)
    took_s = time.monotonic() - started_s
    return Result(row.key, status, took_s, datetime.now(UTC).isoformat(timespec="seconds"), points, reason)


def _run(command: Sequence[str], row: Row, log: Path, timeout_s: float) -> int | None:
    """The exit code; None after a timeout. Ends the process and all processes that it started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(make_tree(), row.variables),
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_points(into: Path) -> tuple[tuple[Point, ...], str]:
    """(points of complete lines, reason for skipping)."""
    points, skipped = [], ""
    for line in into.read_text().splitlines() if into.exists() else ():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            break
        if "skipped" in value:
            skipped = value["skipped"]
        else:
            points.append(Point.from_json(value))
    return tuple(points), skipped


def _judge(code: int | None, points: Sequence[Point], skipped: str, log: Path, timeout_s: float) -> tuple[Status, str]:
    tail = log.read_text(errors="replace")[-_TAIL_CHARS:].strip()
    if code is None:
        return "timed out", f"not over after {timeout_s:.0f} s; the end of what it said: {tail}"
    if code == SKIPPED:
        return "skipped", skipped
    if code != 0:
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "failed", f"{ended}; the end of what it said: {tail}"
    wrong = [point for point in points if point.trial.is_wrong]
    if not wrong:
        return "ok", ""
    first = wrong[0]
    labels = ", ".join(first.case.labels.values())
    detail = f"{first.case.table}, {labels}: error {first.trial.error}, tolerance {first.trial.tolerance}"
    return "wrong", f"{len(wrong)} of {len(points)}; {detail}{'; ' * bool(first.trial.note)}{first.trial.note}"


def progress(result: Result) -> str:
    """One line for a row's result."""
    reason = f": {result.reason.splitlines()[-1][-300:]}" if result.reason else ""
    points = f", {len(result.points)} points" if result.points else ""
    return f"{result.key}: {result.status} in {result.took_s:.1f} s{points}{reason}"
