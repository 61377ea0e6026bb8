"""Checks that need no GPU: every kernel's semantics in Triton's interpreter, every shipped form compiled for every
architecture, the engine's checks on the processor, and the tables that a GPU would fill.

It measures no speed.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.catalogue import PARTS, rows
from benchmarks.gpu.runner import Options, Result, Results, Row, run_rows
from benchmarks.gpu.tree import ROOT, environment, make_tree

DRY_FILE = ROOT / "build" / "gpu-dry.json"
TABLE = ROOT / "benchmarks" / "results" / "compiled.json"
"""The committed table of an earlier compilation."""
_REHEARSED = ("first", "headline", "profile", "checks")
_LISTED = tuple(part for part in PARTS if part not in ("first", "profile", "checks"))
"""Parts whose points are known beforehand."""
_COMPILE_TIMEOUT_S = 1800.0
"""Two cores take seven minutes without a cache, 40 s with one (AMD EPYC Zen 4, 2026-11-26)."""
_COMPILE_KNOWN_S = 30.0
_NUMERIC_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class DryRow:
    """One form of a kernel on one architecture."""

    op: str
    config: str
    sm: int
    regs: int
    stack: int
    smem: int
    loop: int
    """Instructions of the main loop."""
    shared_per_global: float
    """Bytes from and to shared memory for each byte that the main loop reads from global memory."""
    tensor_core: str
    """Number of tensor core instructions of each kind."""
    max_err: float | None
    """Error of the op's numeric check, the same for all of its forms; None if it has no check, with the `reason`."""
    tol: float | None
    reason: str
    faults: tuple[str, ...]

    @property
    def is_wrong(self) -> bool:
        off = self.max_err is not None and (self.tol is None or not self.max_err <= self.tol)
        return bool(self.faults) or off


def join(compiled: Sequence[Mapping[str, Any]], numerics: Mapping[str, Mapping[str, Any]]) -> list[DryRow]:
    """Join compiled forms with the numeric checks of their ops."""
    nothing = {"max_err": None, "tol": None, "reason": "no numeric check"}
    return [
        DryRow(
            op=row["op"],
            config=row["config"],
            sm=row["sm"],
            regs=row["registers"],
            stack=row["stack_bytes"],
            smem=row["shared_bytes"],
            loop=row["loop_instructions"],
            shared_per_global=row["shared_per_global"],
            tensor_core=", ".join(f"{count} {name}" for name, count in row["matrix"].items()),
            **numerics.get(row["op"], nothing),
            faults=tuple(row["faults"]),
        )
        for row in compiled
    ]


def run(options: Options, say: Callable[[str], None], only: Callable[[Row], bool]) -> int:
    """Run everything, or the rows of the checks that `only` accepts; 1 if something is wrong."""
    started_s = time.monotonic()
    folder = options.work_dir / "dry"
    folder.mkdir(parents=True, exist_ok=True)
    checks, lost = _checks(options, folder / "results.jsonl", say, only)
    with ThreadPoolExecutor() as pool:
        # These processes cannot fill all processors alone, so running side by side wastes least time.
        numerics_later = pool.submit(_numerics, folder / "numeric.json", say)
        tables_later = pool.submit(_listed, folder / "listed.jsonl")
        compiled = _compiled(folder / "compiled.json", say)
        numerics, tables = numerics_later.result(), tables_later.result()
    forms = join(compiled, numerics)
    print(report.render(checks, "Checks without a GPU", is_measured=False))
    for part, results in tables.items():
        print(report.render(results, f"{part}: the empty form", is_measured=False))
    DRY_FILE.parent.mkdir(parents=True, exist_ok=True)
    DRY_FILE.write_text(json.dumps(_told(forms, checks), indent=1) + "\n")
    found = {"numeric checks": numerics, "compilation": compiled, **tables}
    wrong = [*_wrong(forms, checks), *lost, *(f"{name}: gave nothing" for name in found if not found[name])]
    wrong += _unlike_the_table(folder / "compiled.json")
    for line in wrong:
        say(f"WRONG {line}")
    without = sorted({form.op for form in forms if form.max_err is None})
    say(f"{len(forms)} forms, {len(checks)} rows of checks: {len(wrong)} wrong")
    say(f"kernels without a numeric check: {', '.join(without) or 'none'}")
    say(f"{DRY_FILE.relative_to(ROOT)} written, {time.monotonic() - started_s:.0f} s")
    return int(bool(wrong))


def _checks(
    options: Options, results_file: Path, say: Callable[[str], None], only: Callable[[Row], bool]
) -> tuple[list[Result], list[str]]:
    """(results of the rows of `_REHEARSED`, what was lost of them). They run small and on the processor, without
    results of earlier runs."""
    results_file.unlink(missing_ok=True)
    on_processor = replace(options, device="cpu", is_rehearsal=True, until_s=math.inf)
    # Nothing is timed, so rows need not run alone.
    asked = [replace(row, is_timed=False) for part in _REHEARSED for row in rows(part) if only(row)]
    results = Results(results_file)
    done = run_rows(asked, results, on_processor, say)[0]
    return done, [f"{key}: its result is not in {results_file}" for key in results.lost(done)]


def _wrong(forms: Sequence[DryRow], checks: Sequence[Result]) -> Iterator[str]:
    for form in forms:
        if form.is_wrong:
            why = "; ".join(form.faults) or f"error {form.max_err}"
            yield f"{form.op}, {form.config}, sm_{form.sm}: {why}"
    for result in checks:
        if result.status not in ("ok", "skipped"):
            yield f"{result.key}: {result.status}: {result.reason[-500:]}"


def _unlike_the_table(into: Path) -> Iterator[str]:
    """A line if the compiled forms are not those of the committed table. Another Triton gives other code, so then only
    their number counts."""
    anew = f"python -m inferd.kernels.compile.aot --write {TABLE}"
    if not TABLE.exists():
        yield f"{TABLE.name} is gone: {anew}"
    elif into.exists():
        listed, found = json.loads(TABLE.read_text()), json.loads(into.read_text())
        known = set(map(str, listed["rows"]))
        others = sum(str(row) not in known for row in found["rows"]) if found["triton"] == listed["triton"] else 0
        if others or len(found["rows"]) != len(known):
            yield f"{others} of {len(found['rows'])} forms are not among the {len(known)} of {TABLE.name}: {anew}"


def _told(forms: Sequence[DryRow], checks: Sequence[Result]) -> dict[str, Any]:
    check_rows = [{"row": result.key, "status": result.status, "reason": result.reason} for result in checks]
    return {"note": "no GPU: nothing was timed", "rows": [asdict(form) for form in forms], "checks": check_rows}


def _python(*arguments: str, timeout_s: float, **variables: str) -> int:
    command = [sys.executable, "-P", "-m", *arguments]
    env = environment(make_tree(), variables)
    return subprocess.run(command, env=env, cwd=ROOT, timeout=timeout_s, check=False).returncode


def _numerics(into: Path, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    into.unlink(missing_ok=True)
    _python("benchmarks.gpu.numeric", "--out", str(into), timeout_s=_NUMERIC_TIMEOUT_S, TRITON_INTERPRET="1")
    if not into.exists():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(into.read_text())
    say(f"numeric checks: {len(found)} ops and kernels")
    return found


def _compiled(into: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows of `kernels/compile/aot.py`; this module judges their faults. Forms that the committed table has are
    compiled for `_COMPILE_KNOWN_S`: enough for all of them if the compiler's cache has most."""
    into.unlink(missing_ok=True)
    known = ["--since", str(TABLE), "--known-for", str(_COMPILE_KNOWN_S)]
    command = [sys.executable, "-P", "-m", "inferd.kernels.compile.aot", "--write", str(into), *known]
    done = subprocess.run(
        [*command, "--jobs", str(os.cpu_count() or 1)],
        env=environment(make_tree()),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_COMPILE_TIMEOUT_S,
        check=False,
    )
    found: list[dict[str, Any]] = json.loads(into.read_text())["rows"] if into.exists() else []
    say(f"forms: {(done.stdout.splitlines() or ['nothing'])[-1]}")
    return found


def _listed(into: Path) -> dict[str, list[Result]]:
    """By part, every point of its rows, without measurements."""
    into.unlink(missing_ok=True)
    _python("benchmarks.gpu.listing", str(into), *_LISTED, timeout_s=_NUMERIC_TIMEOUT_S)
    results = Results(into).read().values()
    return {part: [result for result in results if result.key.startswith(f"{part}/")] for part in _LISTED}
