"""Markdown tables, aligned for reading in a terminal. A cell without a measurement stays empty."""

from __future__ import annotations

from collections.abc import Sequence

Cell = str | float | None


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A Markdown table: the first column to the left, numbers to the right. Every row is as long as `columns`."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max([3, len(name), *(len(row[i]) for row in texts)]) for i, name in enumerate(columns)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(row, widths) for row in (list(columns), rule, *texts))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join(padded)} |"


def _text(cell: Cell) -> str:
    """A number with three or four significant figures."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    if cell >= 1000:
        return f"{cell:,.0f}"
    return f"{cell:.0f}" if cell >= 100 else f"{cell:.1f}" if cell >= 10 else f"{cell:.2f}"
