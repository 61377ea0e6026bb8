"""The report of a load run, or of a comparison, as one HTML file with plots. It loads nothing and works offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from itertools import accumulate
from typing import Any

from inferd.server.commands.bench.answer import Outcome
from inferd.server.commands.bench.charts import Point, histogram, line_chart
from inferd.server.commands.bench.load import LoadRun
from inferd.server.commands.bench.options import LoadOptions
from inferd.server.commands.bench.report import BenchReport, goodput_line, headline, quantile, warnings

_NUM_WINDOWS = 24
"""Parts of the run over which figures are shown. Fewer if there are few requests."""
_LEAST_PER_WINDOW = 4
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #67717d; --line: #e3e6ea; --paper: #fff;
  --c0: #1f6feb; --c1: #d9730d; --c2: #c0392b; --c3: #2e8b57 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --dim: #98a2ae; --line: #303841; --paper: #14181d } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 76rem; padding: 0 1rem }
h1 { font-size: 1.35rem } h2 { font-size: 1rem; margin: 1.5rem 0 .3rem } p { margin: .3rem 0 }
table { border-collapse: collapse } td, th { padding: .2rem .8rem .2rem 0; text-align: right }
td:first-child, th:first-child { text-align: left } th { color: var(--dim); font-weight: 500 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem 1.5rem }
.warning { color: var(--c1) } .dim { color: var(--dim) }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif } svg text { fill: var(--dim) }
svg path { fill: none; stroke-width: 1.8 } svg .g { stroke: var(--line); stroke-width: 1 } svg .b { fill: var(--c0) }
.s0 { stroke: var(--c0) } .s1 { stroke: var(--c1) } .s2 { stroke: var(--c2) } .s3 { stroke: var(--c3) }
circle { stroke: none } circle.s0 { fill: var(--c0) } circle.s1 { fill: var(--c1) } circle.s2 { fill: var(--c2) }
circle.s3 { fill: var(--c3) }
"""


def run_page(run: LoadRun, report: BenchReport, options: LoadOptions, content: Mapping[str, Any]) -> str:
    """The page of one run. `content`: the run's JSON."""
    ok = [outcome for outcome in run.outcomes if outcome.error is None]
    began_s = min((outcome.start_s for outcome in run.outcomes), default=0.0)
    parts = [f"<p>{escape(headline(report))}</p>"]
    if options.goodput is not None:
        parts.append(f"<p>{escape(goodput_line(report, options.goodput))}</p>")
    if report.num_failed:
        failed = ", ".join(f"{count} x {error}" for error, count in report.errors.items())
        parts.append(f'<p class="warning">{report.num_failed} requests failed: {escape(failed)}</p>')
    parts += [f'<p class="warning">warning: {escape(text)}</p>' for text in warnings(report)]
    parts += [_latencies(report), "<h2>Over time</h2>", '<div class="plots">']
    for name, times in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        parts.append(line_chart(_over_time(ok, times, began_s), "arrival, s", f"{name}, ms"))
    parts.append(line_chart({"tokens/s": _tokens_over_time(ok, began_s, run.duration_s)}, "s", "output tokens/s"))
    parts.append(line_chart({"requests": _in_flight(run.outcomes, began_s)}, "s", "requests in flight"))
    parts += ["</div>", "<h2>Distributions</h2>", '<div class="plots">']
    for name, values in (
        ("TTFT", [outcome.ttft_s for outcome in ok]),
        ("TPOT", [outcome.tpot_s for outcome in ok]),
        ("time between tokens", [gap_s for outcome in ok for gap_s in outcome.gaps_s]),
        ("end to end", [outcome.e2e_s for outcome in ok]),
    ):
        parts.append(histogram([value * 1e3 for value in values if value is not None], f"{name}, ms"))
    parts += ["</div>", _settings(content)]
    return document(f"Load test of {content['settings']['model']}", parts)


def document(title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
            *parts,
            "</body></html>\n",
        )
    )


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in lines)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _latencies(report: BenchReport) -> str:
    found = {"TTFT": report.ttft_s, "TPOT": report.tpot_s, "between tokens": report.itl_s, "end to end": report.e2e_s}
    rows = [
        [name, *(f"{value * 1e3:,.2f}" for value in asdict(spread).values())]
        for name, spread in found.items()
        if spread is not None
    ]
    return html_table(("ms", "mean", "p50", "p90", "p99"), rows)


def _settings(content: Mapping[str, Any]) -> str:
    shown = {
        "date": content["date"],
        **content["settings"],
        **{f"{k} (version)": v for k, v in content["versions"].items()},
    }
    rows = [[name, "-" if value is None else str(value)] for name, value in shown.items()]
    return f"<details><summary>Settings</summary>{html_table(('setting', 'value'), rows)}</details>"


def _over_time(outcomes: Sequence[Outcome], times: str, began_s: float) -> dict[str, list[Point]]:
    """Quantiles in ms of the requests that arrived one after another, in windows of equally many requests."""
    found = sorted(
        (outcome.start_s - began_s, value) for outcome in outcomes if (value := getattr(outcome, times)) is not None
    )
    size = max(_LEAST_PER_WINDOW, -(-len(found) // _NUM_WINDOWS))
    windows = [found[start : start + size] for start in range(0, len(found), size)]
    return {
        name: [
            (sum(at for at, _ in window) / len(window), 1e3 * quantile(sorted(value for _, value in window), q))
            for window in windows
        ]
        for name, q in _QUANTILES.items()
    }


def _tokens_over_time(outcomes: Sequence[Outcome], began_s: float, duration_s: float) -> list[Point]:
    """Output tokens per second, in windows of equal length."""
    counts, width_s = [0] * _NUM_WINDOWS, duration_s / _NUM_WINDOWS
    for outcome in outcomes:
        if outcome.first_token_s is not None:
            for at_s in accumulate((outcome.first_token_s - began_s, *outcome.gaps_s)):
                counts[min(int(at_s / width_s), _NUM_WINDOWS - 1)] += 1
    return [((i + 0.5) * width_s, count / width_s) for i, count in enumerate(counts)]


def _in_flight(outcomes: Sequence[Outcome], began_s: float) -> list[Point]:
    """Requests that were under way after each arrival and each end. Failed ones have no known end and are left out."""
    events = sorted(
        event
        for outcome in outcomes
        if outcome.last_token_s is not None
        for event in ((outcome.start_s - began_s, 1), (outcome.last_token_s - began_s, -1))
    )
    return list(zip((at_s for at_s, _ in events), accumulate(change for _, change in events), strict=True))
