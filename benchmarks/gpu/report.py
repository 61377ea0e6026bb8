"""Results as tables: measurements with floor and goal; wrong results without a speed. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks import tables
from benchmarks.gpu.points import KERNEL_TESTS, Point, Rates
from benchmarks.gpu.runner import Result, Row

NOT_MEASURED = "not measured"
FAILED, LEFT = 1, 3
"""Exit codes of a run in which a row is not right, and of one in which only time was too short for all rows."""
_RATES = {"bf16": "bf16", "fp8": "fp8"}


def rates_of(results: Iterable[Result]) -> Rates | None:
    """The best of each rate that rows named "rates" measured; None if none ran."""
    copies: list[float] = []
    flops: dict[str, float] = {}
    for point in (point for result in results for point in result.points):
        what, figures = point.case.labels.get("what", ""), point.trial.figures
        if point.case.table != "rates" or point.trial.is_wrong:
            continue
        if what == "copy" and "bytes/s" in figures:
            copies.append(figures["bytes/s"])
        if what in _RATES and "flop/s" in figures:
            flops[what] = max(flops.get(what, 0.0), figures["flop/s"])
    return Rates(max(copies), flops) if copies and "bf16" in flops else None


def describe_rates(rates: Rates | None) -> str:
    if rates is None:
        return "Rates of the device: not measured, so there are no floors."
    products = ", ".join(f"{name} {value / 1e12:,.0f} TFLOP/s" for name, value in sorted(rates.flops.items()))
    return f"Measured in the same run: copy {rates.copy_bytes / 1e12:.2f} TB/s, products {products}."


def render(results: Sequence[Result], title: str, *, is_measured: bool = True) -> str:
    """Markdown: the state of every row, then a table for each kind of point. Without `is_measured`, figures that
    contain a time are left out."""
    rates = rates_of(results) if is_measured else None
    parts = [f"# {title}", describe_rates(rates) if is_measured else f"Times: {NOT_MEASURED}."]
    points = [point for result in results for point in result.points]
    for name in dict.fromkeys(point.case.table for point in points):
        chosen = [point for point in points if point.case.table == name]
        table = _tests(chosen) if name == KERNEL_TESTS else _table(chosen, rates, is_measured)
        parts.append(f"## {name}\n\n{table}")
    parts.append(f"## Rows\n\n{_states(results)}")
    return "\n\n".join(parts) + "\n"


def verdict(done: Sequence[Result], left: Sequence[Row], lost: Iterable[str]) -> tuple[int, list[str]]:
    """The exit code of a run, and a line for each row that is not right, with the reason, then one with all counts.

    A row that should have run and did not is never right: it failed, its result is lost, or it is left."""
    bad = [result for result in done if result.status not in ("ok", "skipped")]
    skipped = [result for result in done if result.status == "skipped"]
    kept = list(lost)
    lines = [f"{result.key}: {result.status}: {_last_line(result.reason)}" for result in (*bad, *skipped)]
    lines += [f"{key}: its result is lost, run it again" for key in kept]
    lines += [f"{row.key}: left for the next call" for row in left]
    num_right = sum(result.status == "ok" for result in done)
    counts = {"right": num_right, "not right": len(bad), "lost": len(kept), "skipped": len(skipped), "left": len(left)}
    lines.append(", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "right"))
    return FAILED if bad or kept else LEFT if left else 0, lines


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1][-300:]


def _states(results: Sequence[Result]) -> str:
    rows: list[list[tables.Cell]] = []
    for result in results:
        reason = " ".join(result.reason.split()).replace("|", "/")
        rows.append([result.key, result.status, f"{result.took_s:.0f}", reason[-200:]])
    return tables.markdown(["row", "state", "s", "why"], rows)


def _tests(points: Sequence[Point]) -> str:
    """A line a file, and a line for each test of it that failed."""
    rows: list[list[tables.Cell]] = []
    for file in dict.fromkeys(point.case.labels["tests"] for point in points):
        tests = [point for point in points if point.case.labels["tests"] == file]
        failed = [point for point in tests if point.trial.is_wrong]
        passed = sum(point.trial.error is not None for point in tests) - len(failed)
        rows.append([file, passed, len(failed), len(tests) - passed - len(failed), ""])
        rows += [["", "", "", "", f"{p.case.labels['test']}: {p.trial.note.replace('|', '/')[:200]}"] for p in failed]
    return tables.markdown(["tests", "passed", "failed", "skipped", "why"], rows)


def _table(points: Sequence[Point], rates: Rates | None, is_measured: bool) -> str:
    """A table without the columns that no point fills."""
    labels = list(dict.fromkeys(name for point in points for name in point.case.labels))
    names = list(dict.fromkeys(name for point in points for name in point.trial.figures))
    filled = [{**_labels(point, labels), **_measured(point, rates, names, is_measured)} for point in points]
    every = dict.fromkeys(name for row in filled for name in row)
    columns = [name for name in every if any(row.get(name) for row in filled)]
    return tables.markdown(columns, [[row.get(name) for name in columns] for row in filled])


def _labels(point: Point, names: Sequence[str]) -> dict[str, tables.Cell]:
    return {name: point.case.labels.get(name, "") for name in names}


def _measured(point: Point, rates: Rates | None, names: Sequence[str], is_measured: bool) -> dict[str, tables.Cell]:
    case, trial = point.case, point.trial
    shown = trial.without_speed() if trial.is_wrong or not is_measured else trial
    seconds, floor_s = shown.seconds, point.floor_s(rates)
    cells: dict[str, tables.Cell] = {"time": _time(seconds) if is_measured else NOT_MEASURED}
    if seconds and case.amount:
        cells[f"{case.unit}/s"] = case.amount / seconds
        cells[f"floor {case.unit}/s"] = case.amount / floor_s if floor_s else None
    if seconds and not case.amount and case.phases:
        num_bytes = sum(phase.num_bytes for phase in case.phases)
        num_flops = sum(phase.num_flops for phase in case.phases)
        cells["GB/s"] = num_bytes / seconds / 1e9
        cells["of copy"] = f"{num_bytes / seconds / rates.copy_bytes:.0%}" if rates else None
        cells["TFLOP/s"] = num_flops / seconds / 1e12
        cells["floor"] = _time(floor_s) if floor_s else None
    cells["of floor"] = f"{floor_s / seconds:.0%}" if seconds and floor_s else None
    cells["goal"] = case.goal
    cells |= {name: _figure(name, shown.figures.get(name)) for name in names}
    cells["error"] = _error(trial.error)
    cells["allowed"] = None if trial.tolerance is None else f"{trial.tolerance:.1e}"
    cells["verdict"] = "" if trial.error is None else "WRONG" if trial.is_wrong else "right"
    cells["note"] = (shown.note.strip().splitlines() or [""])[-1].replace("|", "/")  # the last line of a traceback
    everything = ("time", f"{case.unit}/s", f"floor {case.unit}/s", "GB/s", "of copy", "TFLOP/s", "floor", "of floor")
    return {name: cells.get(name) for name in dict.fromkeys((*everything, *cells))}


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def _figure(name: str, value: float | None) -> tables.Cell:
    if value is None:
        return None
    if name.endswith("/s") and value >= 1e9:
        return f"{value / 1e12:.2f}e12"
    return f"{value:.2e}" if 0 < abs(value) < 0.01 else value


def _error(error: float | None) -> tables.Cell:
    return None if error is None else f"{error:.1e}"
