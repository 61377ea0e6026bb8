"""Draws line charts and histograms as SVG, for a report in one file that works offline.

A chart is a frame with two axes that begin at 0, and marks in it. Colours come from the page, so that it can be dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

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
