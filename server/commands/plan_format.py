"""The tables of `inferd plan`: their units, and the rows of a memory plan.

Sizes are in GB (10^9 bytes), as models and GPUs are sold, and in GiB (2^30 bytes), as operating systems count.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from inferd.engine.api.memory.activations import PlanLine
from inferd.engine.api.memory.planner import MemoryPlan

_SMALL_BYTES = 10**10
_ESTIMATES = ("activations", "partial sums", "logits", "recorded steps", "processes", "standby")


@dataclass(frozen=True, slots=True)
class Unit:
    """The units of all sizes in one table. One unit for all makes them easy to compare."""

    decimal_name: str
    decimal_bytes: int
    binary_name: str
    binary_bytes: int
    places: int

    @classmethod
    def of(cls, largest_bytes: int) -> Unit:
        if largest_bytes < _SMALL_BYTES:
            return cls("MB", 10**6, "MiB", 2**20, 1)
        return cls("GB", 10**9, "GiB", 2**30, 2)

    def sizes(self, num_bytes: int) -> tuple[str, str]:
        places = self.places
        return f"{num_bytes / self.decimal_bytes:,.{places}f}", f"{num_bytes / self.binary_bytes:,.{places}f}"


class PartsTable:
    """A table with a row for each part of a memory plan."""

    def __init__(self, table: Table, unit: Unit) -> None:
        """`table`: an empty one, which gets the columns."""
        self._table, self._unit = table, unit
        table.add_column("part", no_wrap=True)
        table.add_column(unit.decimal_name, justify="right", no_wrap=True)
        table.add_column(unit.binary_name, justify="right", no_wrap=True)
        table.add_column("bytes = formula")

    def add(self, name: str, num_bytes: int, note: str = "", style: str = "") -> None:
        """Add a row."""
        self._table.add_row(name, *self._unit.sizes(num_bytes), f"{num_bytes:,} {note}".rstrip(), style=style)

    def add_part(self, part: PlanLine) -> None:
        """Add a part with its formula."""
        self.add(part.name, part.num_bytes, f"{'~' if part.name in _ESTIMATES else '='} {part.formula.text}")

    def add_rest(self, plan: MemoryPlan) -> None:
        """Add the parts beside weights and KV, and the total."""
        for part in plan.working:
            self.add_part(part)
        loading = plan.loading
        self.add(loading.name, loading.num_bytes, f"= {loading.formula.text}, freed before serving")
        self.add("total", plan.total_bytes, "peak, while serving or while loading", style="bold")


def table_of(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
