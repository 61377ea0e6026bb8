"""Print the longest files and functions of the product: over 400 lines or 60 is usually two things in one room."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("server", "engine", "kernels")
SHOWN = 15


def main() -> None:
    files: list[tuple[int, str]] = []
    functions: list[tuple[int, str]] = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            source = path.read_text()
            name = str(path.relative_to(ROOT))
            files.append((source.count("\n"), name))
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    functions.append((length, f"{name}:{node.lineno} {node.name}"))
    for title, rows in (("files", files), ("functions", functions)):
        lengths = sorted(length for length, _ in rows)
        print(f"{len(rows)} {title}, median {lengths[len(lengths) // 2]} lines; the longest:")
        for length, name in sorted(rows, reverse=True)[:SHOWN]:
            print(f"  {length:5}  {name}")


if __name__ == "__main__":
    main()
