"""`inferd bench compare`: puts the JSON reports of several runs beside each other, with ratios to the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.bench.page import document, html_table, line_chart

_FIGURES = {
    "requests/s": ("requests_per_s", 1.0),
    "output tokens/s": ("output_tokens_per_s", 1.0),
    **{
        f"{name} {q}, ms": (f"{key}.{q}", 1e3)
        for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("end to end", "e2e_s"))
        for q in ("p50", "p99")
    },
    "goodput, requests/s": ("goodput.requests_per_s", 1.0),
    "cached input tokens": ("num_cached_tokens", 1.0),
    "failed": ("num_failed", 1.0),
}
"""Name -> (path in the results, factor)."""
_IGNORED = ("base_url", "model", "timeout_s")
"""Settings that may differ between runs that can be compared."""
_OF_RATES = ("rate", "num_requests")
"""Settings that differ too if runs send requests at several rates."""
_CACHED_SHARE = 0.1
"""By so much of their input tokens two runs may differ in what the prefix cache had."""


@dataclass(frozen=True, slots=True)
class Run:
    """A report, and the name that its file gives it."""

    name: str
    content: Mapping[str, Any]

    def figure(self, path: str) -> float | None:
        found: Any = self.content["results"]
        for key in path.split("."):
            found = None if found is None else found.get(key)
        return None if found is None else float(found)

    @property
    def cached_share(self) -> float:
        """Share of the input tokens that the prefix cache had."""
        return (self.figure("num_cached_tokens") or 0.0) / (self.figure("num_input_tokens") or 1.0)

    @property
    def rate(self) -> float | None:
        found: float | None = self.content["settings"].get("rate")
        return found


def compare(files: Sequence[Path], page: Path | None) -> int:
    """Print the table, and write `page` if it is given. Raises `ConfigError` for a file that is no report."""
    runs = [_read(file) for file in files]
    head, rows = ["", *(run.name for run in runs)], _rows(runs)
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console, problems = Console(highlight=False), Console(stderr=True, highlight=False)
    console.print(table)
    notes = _differences(runs)
    for note in notes:
        problems.print(f"warning: {note}", style="yellow", markup=False, soft_wrap=True)
    if page is not None:
        page.write_text(_page(runs, head, rows, notes))
    return 0


def _read(file: Path) -> Run:
    try:
        content = orjson.loads(file.read_bytes())
        is_report = content["tool"] == "inferd bench serve" and content["results"] and content["settings"]
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; give files that --json wrote") from error
    except (orjson.JSONDecodeError, KeyError, TypeError):
        is_report = False
    if not is_report:
        raise ConfigError(f"{file} is no report of `inferd bench serve`; give files that --json wrote")
    return Run(file.stem, content)


def _rows(runs: Sequence[Run]) -> list[list[str]]:
    """A row for each figure that some run has. Behind each value stands its ratio to the first run's."""
    rows = []
    for name, (path, factor) in _FIGURES.items():
        values = [run.figure(path) for run in runs]
        if any(value is not None for value in values):
            rows.append([name, *(_cell(value, values[0], factor, is_first=not i) for i, value in enumerate(values))])
    return rows


def _cell(value: float | None, first: float | None, factor: float, *, is_first: bool) -> str:
    if value is None:
        return "-"
    ratio = "" if is_first or not first else f" ({value / first:.2f}x)"
    return f"{value * factor:,.5g}{ratio}"


def _differences(runs: Sequence[Run]) -> list[str]:
    """Settings, and prompts cached from an earlier run, that make the runs different loads."""
    first, notes = runs[0], []
    ignored = _IGNORED + (_OF_RATES if all(run.rate is not None for run in runs) else ())
    for run in runs[1:]:
        mine, theirs = run.content["settings"], first.content["settings"]
        names = [name for name in {**theirs, **mine} if name not in ignored and mine.get(name) != theirs.get(name)]
        differences = ", ".join(f"{name} is {mine.get(name)} instead of {theirs.get(name)}" for name in names)
        notes += [f"{run.name} is another load than {first.name}: {differences}"] if names else []
        if abs(run.cached_share - first.cached_share) > _CACHED_SHARE:
            notes.append(
                f"the prefix cache had {run.cached_share:.0%} of the input tokens of {run.name}, and "
                f"{first.cached_share:.0%} of {first.name}: give each run another --seed, or start the server again"
            )
    return notes


def _page(runs: Sequence[Run], head: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    parts = [html_table(head, rows), *(f'<p class="warning">warning: {escape(note)}</p>' for note in notes)]
    paced = sorted((run for run in runs if run.rate is not None), key=lambda run: run.rate or 0.0)
    if len({run.rate for run in paced}) > 1:
        charts = {
            "goodput, requests/s": {"goodput": "goodput.requests_per_s", "all answers": "requests_per_s"},
            "TTFT, ms": {"p50": "ttft_s.p50", "p99": "ttft_s.p99"},
            "TPOT, ms": {"p50": "tpot_s.p50", "p99": "tpot_s.p99"},
        }
        parts += ["<h2>Over the rate</h2>", '<div class="plots">']
        for y_name, paths in charts.items():
            factor = 1e3 if y_name.endswith("ms") else 1.0
            lines = {
                name: [(run.rate or 0.0, value * factor) for run in paced if (value := run.figure(path)) is not None]
                for name, path in paths.items()
            }
            parts.append(line_chart(lines, "requests/s sent", y_name))
        parts.append("</div>")
    return document(f"{len(runs)} load tests", parts)
