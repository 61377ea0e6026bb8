"""Draws a line chart as SVG for results in a browser, in one function and without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 440, 60, 170, 20, 50
_COLOURS = ("#c0392b", "#2980b9", "#27ae60", "#8e44ad", "#7f8c8d", "#d35400")
_TICKS = 5


def line_chart(xs: Sequence[float], lines: Mapping[str, Sequence[float]], x_name: str, y_name: str) -> str:
    """One line for each name, with a value for each of `xs`. Both axes begin at 0, and the first line is thick."""
    most_x, most_y = max(xs), max(value for values in lines.values() for value in values)

    def place(x: float, y: float) -> tuple[float, float]:
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + width * x / most_x, _TOP + height * (1 - y / most_y)

    def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'

    (x0, y0), (x1, y1) = place(0, 0), place(most_x, most_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        text((x0 + x1) / 2, _HEIGHT - 10, x_name),
        text(16, (y0 + y1) / 2, y_name, more=f'transform="rotate(-90 16 {(y0 + y1) / 2:.0f})"'),
    ]
    for i in range(_TICKS + 1):
        x, y = place(most_x * i / _TICKS, most_y * i / _TICKS)
        parts.append(f'<path d="M{x0:.1f} {y:.1f}H{x1:.1f}M{x:.1f} {y0:.1f}V{y1:.1f}" stroke="#e5e5e5"/>')
        parts.append(text(x, y0 + 18, f"{most_x * i / _TICKS:.3g}"))
        parts.append(text(x0 - 6, y + 4, f"{most_y * i / _TICKS:.3g}", "end"))
    for i, (name, values) in enumerate(lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in zip(xs, values, strict=True))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{1.5 if i else 3}"/>')
        y = _TOP + 16 + 20 * i
        parts.append(f'<path d="M{x1 + 12:.0f} {y - 4}h20" stroke="{colour}" stroke-width="{1.5 if i else 3}"/>')
        parts.append(text(x1 + 38, y, name, "start"))
    return "\n".join((*parts, "</svg>")) + "\n"
