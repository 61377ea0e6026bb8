"""Runs rows, each in a process of its own with a time limit, and stores each point as soon as it is there.

A hang or a crash affects only its row: it is recorded with the end of its output. Its earlier points stay, because each
was checked separately. If the machine is taken away, the points of the running rows stay too. The next call runs the
rows that are not yet right, and those whose source has changed. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.gpu.points import Point
from benchmarks.gpu.tree import ROOT, environment, make_tree

Status = Literal["ok", "wrong", "failed", "timed out", "skipped", "running"]
"""A result is "running" until the row ends. It stays so if this process was killed."""
SKIPPED = 77
"""Exit code of a row that cannot run on this machine; the last line of its file gives the reason."""
WORK_DIR = ROOT / "build" / "gpu"
_TAIL_CHARS = 2000
_STORE_EVERY_S = 1.0
_LEAST_S = 10.0
"""Time that a row gets even if it starts just before the end of all time."""


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
    folders: tuple[str, ...] = ()
    """Folders of the checkout whose modules it runs in other processes. Files that its own process imports are found
    without them."""
    is_preparation: bool = False
    """Whether it runs in every call, because it leaves something on the machine that later rows need."""

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
    asked: str = ""
    """The row's definition, and the device: `asked_of`."""
    files: tuple[str, ...] = ()
    """Files and folders of the checkout that it ran, relative to it."""
    digest: str = ""
    """Digest of the content of `files`. Empty if one was gone or changed while the row ran."""

    def as_json(self) -> dict[str, Any]:
        return {
            "row": self.key,
            "status": self.status,
            "took_s": round(self.took_s, 2),
            "at": self.at,
            "reason": self.reason,
            "points": [point.as_json() for point in self.points],
            "asked": self.asked,
            "files": list(self.files),
            "digest": self.digest,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Result:
        points = tuple(map(Point.from_json, value["points"]))
        source = value.get("asked", ""), tuple(value.get("files", ())), value.get("digest", "")
        return cls(value["row"], value["status"], value["took_s"], value["at"], points, value["reason"], *source)

    def is_final_for(self, asked: str) -> bool:
        """Whether another run would give the same: it found something, was right, and its source is as it was. What a
        row lacked may be there now: then it was skipped, or its points are notes alone."""
        found = any(point.trial.is_found for point in self.points)
        is_same = self.asked == asked and self.digest != "" and self.digest == digest_of(self.files)
        return self.status == "ok" and found and is_same


def digest_of(files: Iterable[str]) -> str:
    """Digest of the content of files of the checkout, and of all Python files of folders. Empty if one is gone."""
    found = hashlib.sha256()
    for name in files:
        path = ROOT / name
        if not path.exists():
            return ""
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _changed_since(files: Iterable[str], at_s: float) -> bool:
    """`at_s`: seconds of the system's clock."""
    paths = [ROOT / name for name in files]
    each = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])]
    return any(file.exists() and file.stat().st_mtime > at_s for file in each)


def asked_of(row: Row, options: Options) -> str:
    """All that decides what a row measures, besides the source."""
    own = [row.target, sorted(row.arguments.items()), sorted(row.variables.items())]
    return json.dumps([*own, options.device, options.device_name, options.is_rehearsal])


def child_command(row: Row, into: Path, options: Options) -> list[str]:
    """The command that runs a row: `child.py`, which writes points to `into`."""
    asked = {"target": row.target, "arguments": dict(row.arguments), "device": options.device}
    command = [sys.executable, "-P", "-m", "benchmarks.gpu.child", "--into", str(into), json.dumps(asked)]
    return [*command, *(["--rehearse"] * options.is_rehearsal)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options for running rows."""

    device: str = "cuda"
    device_name: str = ""
    is_rehearsal: bool = False
    """Tiny cases, which show that everything runs and measure nothing."""
    is_again: bool = False
    """Whether rows that have a result run again."""
    until_s: float = math.inf
    """The monotonic clock's time from which no row starts: those are left for the next call. None goes on for more
    than a few seconds after it."""
    jobs: int = 1
    """Rows without timing that run side by side."""
    work_dir: Path = WORK_DIR
    """Logs and points of running rows."""
    command: Callable[[Row, Path, Options], list[str]] = child_command


class Results:
    """A log of results, in one file or in several copies: a line for each point of a running row, and one for its end,
    of which the last counts.

    The first path is what the caller asked for, and may be in a folder that is emptied between calls. The others keep a
    copy; lines that only they have are added to the first.
    """

    def __init__(self, path: Path, *copies: Path) -> None:
        self._paths, self._lock = tuple(dict.fromkeys(each.resolve() for each in (path, *copies))), threading.Lock()
        for each in self._paths:
            each.parent.mkdir(parents=True, exist_ok=True)
        for key, result in self._merged().items():
            if _results_in(path).get(key) != result:
                _append(path, replace(result, status="running", points=()))
                _append(path, result)

    def read(self) -> dict[str, Result]:
        """Results by key. An incomplete last line is ignored."""
        return _results_in(self._paths[0])

    def append(self, result: Result) -> None:
        """Append the end of a row, or what a running row has to add: no points at its start, then each once."""
        with self._lock:
            for path in self._paths:
                _append(path, result)

    def lost(self, done: Iterable[Result]) -> list[str]:
        """The rows among `done` whose result is not in the first file, or has fewer points there."""
        kept = {key: (found.status, len(found.points)) for key, found in self.read().items()}
        return [result.key for result in done if kept.get(result.key) != (result.status, len(result.points))]

    def _merged(self) -> dict[str, Result]:
        """The latest result of each row, of the first path if two are as late."""
        found: dict[str, Result] = {}
        for path in self._paths:
            for key, result in _results_in(path).items():
                known = found.get(key)
                if known is None or (result.at, result.status != "running") > (known.at, known.status != "running"):
                    found[key] = result
        return found


def _results_in(path: Path) -> dict[str, Result]:
    found: dict[str, Result] = {}
    running: dict[str, Result] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            result = Result.from_json(json.loads(line))
        except (json.JSONDecodeError, KeyError, TypeError):
            continue  # cut off, or of another version of this program
        if result.status != "running":
            found[result.key] = result
            running.pop(result.key, None)
        elif result.points and result.key in running:
            running[result.key] = replace(result, points=running[result.key].points + result.points)
        else:
            running[result.key] = result
    for key, part in running.items():
        # A run that was cut off does not hide a whole one.
        if key not in found or found[key].status != "ok" or len(part.points) > len(found[key].points):
            found[key] = part
    return found


def _append(path: Path, result: Result) -> None:
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(result.as_json()).encode() + b"\n")


def run_rows(
    rows: Sequence[Row], results: Results, options: Options, say: Callable[[str], None]
) -> tuple[list[Result], list[Row]]:
    """(results of the rows that ran, rows left for lack of time). Timed rows run one after another, in order. Rows
    between them run `options.jobs` at a time."""
    earlier = {} if options.is_again else results.read()
    asked = {row.key: asked_of(row, options) for row in rows if not row.is_preparation}
    known = {key for key in asked if key in earlier and earlier[key].is_final_for(asked[key])}
    todo = [row for row in rows if row.key not in known]
    done: list[Result] = []
    left: list[Row] = []

    def one(row: Row) -> None:
        remaining_s = options.until_s - time.monotonic()
        if remaining_s <= 0:
            left.append(row)
            say(f"{row.key}: left, the time is up")
            return
        limit_s = min(row.timeout_s, max(remaining_s, _LEAST_S))
        result = run_row(row, options, limit_s, results.append)
        results.append(result)
        # A row that the end of all time cut off has kept its points, and is no failure.
        is_cut_off = result.status == "timed out" and limit_s < row.timeout_s
        left.append(row) if is_cut_off else done.append(result)
        say(progress(result))

    for row in rows:
        if row.key in known:
            say(f"{row.key}: has a result of the same source")
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


def run_row(
    row: Row, options: Options, timeout_s: float, store: Callable[[Result], None] = lambda result: None
) -> Result:
    """Run it now, even if it has a result. `store` gets a result without points when it starts, and soon after each
    new point one with what is new."""
    folder = options.work_dir / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    into, log = folder / f"{row.file_name}.points", folder / f"{row.file_name}.log"
    into.unlink(missing_ok=True)
    started_s, started_at_s = time.monotonic(), time.time()

    def result(status: Status, points: tuple[Point, ...] = (), reason: str = "", files: Sequence[str] = ()) -> Result:
        now, took_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic() - started_s
        source = tuple(files) + row.folders
        digest = "" if _changed_since(source, started_at_s) else digest_of(source)
        return Result(row.key, status, took_s, now, points, reason, asked_of(row, options), source, digest)

    store(result("running"))
    num_stored = 0

    def store_new() -> None:
        nonlocal num_stored
        if new := _read_written(into).points[num_stored:]:
            num_stored += len(new)
            store(result("running", new))

    code = _run(options.command(row, into, options), row, log, timeout_s, store_new)
    written = _read_written(into)
    status, reason = _judge(code, written, into, log, timeout_s)
    return result(status, written.points, reason, written.files)


def _run(command: Sequence[str], row: Row, log: Path, timeout_s: float, each_second: Callable[[], None]) -> int | None:
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
    until_s = time.monotonic() + timeout_s
    try:
        while (remaining_s := until_s - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(remaining_s, _STORE_EVERY_S))
            each_second()
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _Written(NamedTuple):
    """Complete lines that a row's process wrote."""

    points: tuple[Point, ...]
    skipped: str
    """The reason for skipping."""
    files: tuple[str, ...]
    """Files of the checkout that it imported."""


def _read_written(into: Path) -> _Written:
    points: list[Point] = []
    skipped, files = "", ()
    for line in into.read_text().splitlines() if into.exists() else ():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            break
        if "skipped" in value:
            skipped = value["skipped"]
        elif "files" in value:
            files = tuple(value["files"])
        else:
            points.append(Point.from_json(value))
    return _Written(tuple(points), skipped, files)


def _judge(code: int | None, written: _Written, into: Path, log: Path, timeout_s: float) -> tuple[Status, str]:
    tail = log.read_text(errors="replace")[-_TAIL_CHARS:].strip()
    if code is None:
        return "timed out", f"not over after {timeout_s:.0f} s; the end of what it said: {tail}"
    if code == SKIPPED and written.skipped:
        return "skipped", written.skipped
    if code != 0:
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "failed", f"{ended}; the end of what it said: {tail}"
    if not written.points:
        return "failed", f"it ended well and left no point: {into.name} is {'empty' if into.exists() else 'gone'}"
    wrong = [point for point in written.points if point.trial.is_wrong]
    if not wrong:
        return "ok", ""
    first = wrong[0]
    labels = ", ".join(first.case.labels.values())
    detail = f"{first.case.table}, {labels}: error {first.trial.error}, tolerance {first.trial.tolerance}"
    return "wrong", f"{len(wrong)} of {len(written.points)}; {detail}{'; ' * bool(first.trial.note)}{first.trial.note}"


def progress(result: Result) -> str:
    """One line for a row's result."""
    reason = f": {result.reason.splitlines()[-1][-300:]}" if result.reason else ""
    points = f", {len(result.points)} points" if result.points else ""
    return f"{result.key}: {result.status} in {result.took_s:.1f} s{points}{reason}"
