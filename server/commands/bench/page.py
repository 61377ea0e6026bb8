"""The report of a load run, or of a comparison, as one HTML file with plots. It loads nothing and works offline.

Line charts and histograms are SVG. A chart is a frame with two axes that begin at 0, and marks in it. Colours come from
the page, so that it can be dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from itertools import accumulate
from typing import Any

from inferd.server.commands.bench.answer import Outcome
from inferd.server.commands.bench.load import LoadRun
from inferd.server.commands.bench.options import LoadOptions
from inferd.server.commands.bench.report import BenchReport, goodput_line, headline, quantile, warnings

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 260, 62, 14, 26, 44
_TICKS, _MAX_DOTS = 4, 60
_NICE = (1, 2, 2.5, 5, 10)

Point = tuple[float, float]


def line_chart(lines: Mapping[str, Sequence[Point]], x_name: str, y_name: str) -> str:
    """One line for each name, which may have points of its own. Points that are not finite are left out."""
    drawn = {name: [point for point in points if all(map(math.isfinite, point))] for name, points in lines.items()}
    frame = _Frame([point for points in drawn.values() for point in points], x_name, y_name)
    marks = []
    for i, (name, points) in enumerate(drawn.items()):
        places = [frame.place(*point) for point in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        marks.append(f'<path class="s{i % 4}" d="M{path}"/>' if len(places) > 1 else "")
        if len(places) <= _MAX_DOTS:
            marks += [f'<circle class="s{i % 4}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places]
        x = _LEFT + 8 + 110 * i
        marks.append(f'<path class="s{i % 4}" d="M{x} {_TOP - 12}h18"/>' + _text(x + 24, _TOP - 8, name, "start"))
    return frame.around(marks)


def histogram(values: Sequence[float], x_name: str, num_bins: int = 40) -> str:
    """The number of values in bins of equal width, from 0 to the 99.5th percentile. The last bin has those above."""
    if not values:
        return line_chart({}, x_name, "number")
    ordered = sorted(values)
    most = ordered[min(len(ordered) - 1, int(0.995 * len(ordered)))] or 1.0
    counts = [0] * num_bins
    for value in ordered:
        counts[min(int(value / most * num_bins), num_bins - 1)] += 1
    frame = _Frame([(most, max(counts))], x_name, "number")
    marks = []
    for i, count in enumerate(counts):
        (x0, y0), (x1, y1) = frame.place(most * i / num_bins, 0), frame.place(most * (i + 1) / num_bins, count)
        if count:
            marks.append(f'<rect class="b" x="{x0:.1f}" y="{y1:.1f}" width="{x1 - x0:.1f}" height="{y0 - y1:.1f}"/>')
    return frame.around(marks)


class _Frame:
    """The axes, which hold all points."""

    def __init__(self, points: Sequence[Point], x_name: str, y_name: str) -> None:
        self._step_x = _step(max((x for x, _ in points), default=0.0))
        self._step_y = _step(max((y for _, y in points), default=0.0))
        self._names = x_name, y_name

    def place(self, x: float, y: float) -> Point:
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + width * x / (_TICKS * self._step_x), _HEIGHT - _BOTTOM - height * y / (_TICKS * self._step_y)

    def around(self, marks: Sequence[str]) -> str:
        x_name, y_name = self._names
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        parts = [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(f"{y_name} over {x_name}")}">',
            _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_name),
            _text(14, middle, y_name, more=f' transform="rotate(-90 14 {middle:.0f})"'),
        ]
        for i in range(_TICKS + 1):
            x, y = self.place(i * self._step_x, i * self._step_y)
            parts.append(f'<path class="g" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            parts.append(_text(x, _HEIGHT - _BOTTOM + 16, f"{i * self._step_x:.4g}"))
            parts.append(_text(_LEFT - 6, y + 4, f"{i * self._step_y:.4g}", "end"))
        return "\n".join((*parts, *filter(None, marks), "</svg>"))


def _step(most: float) -> float:
    """A round distance between ticks, so that the last tick is not below `most`."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most / _TICKS))
    return next(factor * power for factor in _NICE if factor * power * _TICKS >= most * 0.999)


def _text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


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
