"""The table of compiled kernels: what a row says, and how the table is read, written and shown.

It knows no compiler and no rule.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """One form of a kernel, compiled for one architecture."""

    op: str
    config: str
    sm: int
    registers: int
    stack_bytes: int
    spills: int
    """Loads from and stores to local memory."""
    shared_bytes: int
    wide_loads: int
    """Loads of 16 bytes from global memory, asynchronous copies included."""
    loop_instructions: int
    """Instructions of the main loop (`sass.Code.main_loop`); 0 without a loop."""
    shared_per_global: float
    """Bytes from and to shared memory in the main loop, for each byte that it reads from global memory."""
    matrix: Mapping[str, int]
    """Number of tensor core instructions of each kind."""
    source: str
    """The form's `digest`."""
    faults: tuple[str, ...]
    accepted: tuple[str, ...]
    """Known faults, each with the reason why it is accepted."""


@dataclass(frozen=True, slots=True)
class Table:
    """The compiled forms, and the version of Triton that compiled them."""

    triton: str
    rows: tuple[CompiledForm, ...]

    def sources(self) -> dict[tuple[str, str], str]:
        """The digest of each form by (op, config); empty if another version of Triton is installed."""
        return {(row.op, row.config): row.source for row in self.rows} if self.triton == triton_version() else {}


def triton_version() -> str:
    return importlib.metadata.version("triton")


def read_table(path: Path) -> Table:
    """The table that `write_table` wrote; an empty one if there is no file."""
    if not path.exists():
        return Table("", ())
    content = json.loads(path.read_text())
    rows = ({**row, "faults": tuple(row["faults"]), "accepted": tuple(row["accepted"])} for row in content["rows"])
    return Table(content["triton"], tuple(CompiledForm(**row) for row in rows))


def write_table(path: Path, rows: Sequence[CompiledForm]) -> None:
    """Write JSON with one row a line."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f'{{"triton": {json.dumps(triton_version())}, "rows": [\n{lines}\n]}}\n')


def joined(
    rows: Sequence[CompiledForm], others: Table, ops: Sequence[str], names: Sequence[tuple[str, str]]
) -> list[CompiledForm]:
    """Rows of `ops`, among those that a table has for other ops, in the order of `names`, each (op, config)."""
    order = {name: index for index, name in enumerate(names)}
    kept = [row for row in others.rows if row.op not in ops and (row.op, row.config) in order]
    return sorted([*kept, *rows], key=lambda row: (order[row.op, row.config], row.sm))


def render(rows: Sequence[CompiledForm]) -> str:
    """A readable table with one row a line."""
    lines = [
        f"{'op':18} {'config':44} {'sm':>4} {'regs':>5} {'stack':>6} {'smem':>7} {'16 B':>5} {'loop':>5} "
        f"{'shared':>6}  matrix"
    ]
    for row in rows:
        matrix = ", ".join(f"{count} {name}" for name, count in row.matrix.items())
        lines.append(
            f"{row.op:18} {row.config:44} {row.sm:4} {row.registers:5} {row.stack_bytes:6} {row.shared_bytes:7} "
            f"{row.wide_loads:5} {row.loop_instructions:5} {row.shared_per_global:6.2f}  {matrix}"
            f"{''.join(f'  FAULT {fault}' for fault in row.faults)}"
            f"{''.join(f'  known: {fault}' for fault in row.accepted)}"
        )
    return "\n".join(lines)
