"""What can be proven without a GPU: every kernel's semantics in Triton's interpreter, every shipped form compiled for
every architecture, the engine's checks on the processor; and which tables a GPU would fill.

Speeds are none of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.catalogue import PARTS, rows
from benchmarks.gpu.runner import Options, Result, Results, Row, run_rows
from benchmarks.gpu.tree import ROOT, environment, make_tree

DRY_FILE = ROOT / "build" / "gpu-dry.json"
_COMPILE_TIMEOUT_S = 1800.0
"""Without a cache; with one it is a minute."""
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
    tensor_core: str
    max_err: float | None
    """Of the op's numeric check, the same for all of its forms; None where it has none, for `reason`."""
    tol: float | None
    reason: str
    faults: tuple[str, ...]

    @property
    def is_wrong(self) -> bool:
        off = self.max_err is not None and (self.tol is None or not self.max_err <= self.tol)
        return bool(self.faults) or off


def join(compiled: Sequence[Mapping[str, Any]], numerics: Mapping[str, Mapping[str, Any]]) -> list[DryRow]:
    """What compiled beside what was computed."""
    nothing = {"max_err": None, "tol": None, "reason": "no numeric check"}
    return [
        DryRow(
            op=row["op"],
            config=row["config"],
            sm=row["sm"],
            regs=row["registers"],
            stack=row["stack_bytes"],
            smem=row["shared_bytes"],
            tensor_core=row["matrix"],
            **numerics.get(row["op"], nothing),
            faults=tuple(row["faults"]),
        )
        for row in compiled
    ]


def run(options: Options, say: Callable[[str], None], only: Callable[[Row], bool]) -> int:
    """Everything, or the rows of the checks that `only` takes; 1 where something is wrong."""
    started_s = time.monotonic()
    folder = options.work_dir / "dry"
    folder.mkdir(parents=True, exist_ok=True)
    results_file = folder / "results.jsonl"
    results_file.unlink(missing_ok=True)
    on_processor = replace(options, device="cpu", is_rehearsal=True, jobs=options.jobs, budget_s=3600.0)
    checks, _ = run_rows(list(filter(only, rows("checks"))), Results(results_file), on_processor, say)
    numerics = _numerics(folder / "numeric.json", say)
    compiled = _compiled(folder / "compiled.json", say)
    forms = join(compiled, numerics)
    print(report.render(checks, "Checks without a GPU", is_measured=False))
    tables = _listed(folder / "listed.jsonl")
    for part, results in tables.items():
        print(report.render(results, f"{part}: the empty form", is_measured=False))
    bad = [form for form in forms if form.is_wrong]
    unsound = [result for result in checks if result.status not in ("ok", "skipped")]
    parts = (("numeric checks", numerics), ("compilation", compiled), ("the empty tables", tables["kernels"]))
    failed = [name for name, found in parts if not found]
    DRY_FILE.write_text(json.dumps(_told(forms, checks), indent=1) + "\n")
    for form in bad:
        say(f"WRONG {form.op}, {form.config}, sm_{form.sm}: {'; '.join(form.faults) or f'error {form.max_err}'}")
    for result in unsound:
        say(f"WRONG {result.key}: {result.status}: {result.reason[-500:]}")
    for name in failed:
        say(f"WRONG {name}: gave nothing")
    without = sorted({form.op for form in forms if form.max_err is None})
    say(f"{len(forms)} forms compiled, {len(bad)} wrong; {len(checks)} rows of checks, {len(unsound)} not right")
    say(f"kernels without a numeric check: {', '.join(without) or 'none'}")
    say(f"{DRY_FILE.relative_to(ROOT)} written, {time.monotonic() - started_s:.0f} s")
    return int(bool(bad or unsound or failed))


def _told(forms: Sequence[DryRow], checks: Sequence[Result]) -> dict[str, Any]:
    told = [{"row": result.key, "status": result.status, "reason": result.reason} for result in checks]
    return {"note": "no GPU: nothing was timed", "rows": [asdict(form) for form in forms], "checks": told}


def _python(*arguments: str, timeout_s: float, **variables: str) -> int:
    command = [sys.executable, "-P", "-m", *arguments]
    env = environment(make_tree(), variables)
    return subprocess.run(command, env=env, cwd=ROOT, timeout=timeout_s, check=False).returncode


def _numerics(into: Path, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    into.unlink(missing_ok=True)
    _python("benchmarks.gpu.numeric", str(into), timeout_s=_NUMERIC_TIMEOUT_S, TRITON_INTERPRET="1")
    if not into.exists():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(into.read_text())
    say(f"numeric checks: {len(found)} ops and kernels")
    return found


def _compiled(into: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows of `kernels/aot.py`, whose faults are judged here."""
    into.unlink(missing_ok=True)
    jobs = str(os.cpu_count() or 1)
    with open(os.devnull, "w") as quiet:
        command = [sys.executable, "-P", "-m", "inferd.kernels.aot", "--write", str(into), "--jobs", jobs]
        env = environment(make_tree())
        subprocess.run(command, env=env, cwd=ROOT, stdout=quiet, timeout=_COMPILE_TIMEOUT_S, check=False)
    found: list[dict[str, Any]] = json.loads(into.read_text())["rows"] if into.exists() else []
    say(f"compiled: {len(found)} forms")
    return found


def _listed(into: Path) -> dict[str, list[Result]]:
    """By part, every point of its rows, none of it measured."""
    into.unlink(missing_ok=True)
    _python("benchmarks.gpu.listing", str(into), *PARTS[1:], timeout_s=_NUMERIC_TIMEOUT_S)
    results = Results(into).read().values()
    return {part: [result for result in results if result.key.startswith(f"{part}/")] for part in PARTS[1:]}
