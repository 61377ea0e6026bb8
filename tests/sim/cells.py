"""The KV of the simulated device: a cell holds the (token id, position, cache group) that a forward pass wrote.

Content that was never written, was freed, or is about to be overwritten is poison, and reading it fails. Knows no rows
and no requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.sim.oracle import STATE, Views, Windows

Cell = tuple[int, int, int]
"""(token id, position, cache group)."""
Tables = Sequence[Sequence[int]]
"""Block tables by group."""
Tokens = list[dict[int, int]]
"""Tokens that were read, by group and position."""

_POISON: Cell = (-1, -1, -1)
_NAN: Cell = (-2, -2, -2)


class SimulationError(AssertionError):
    """The engine did something that a correct engine never does."""


class Cells:
    """All cells of one device."""

    def __init__(self, num_blocks: int, block_size: int, windows: Windows) -> None:
        self._size, self._windows = block_size, windows
        self.content: list[list[Cell]] = [[_POISON] * block_size for _ in range(num_blocks)]

    def poison(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.content[block_id] = [_POISON] * self._size

    def wipe(self, tables: Tables, num_entries: Sequence[int], start: int) -> None:
        """Erase blocks of an admission from `start` on: only content before its first row's start is cached."""
        size = self._size
        for table, count in zip(tables, num_entries, strict=True):
            for position in range(start, count * size):
                self.content[table[position // size]][position % size] = _POISON

    def write(self, tables: Tables, ids: Sequence[int], start: int, end: int, first_nan: int) -> None:
        """Write the positions `start` to `end - 1` of a sequence, as NaN from `first_nan` on."""
        size = self._size
        for group, table in enumerate(tables):
            if (end - 1) // size >= len(table):
                raise SimulationError(f"a row writes position {end - 1} behind its {len(table)} blocks, group {group}")
            for position in range(start, end):
                cell = _NAN if position >= first_nan else (ids[position], position, group)
                self.content[table[position // size]][position % size] = cell

    def seen(self, group: int, start: int, end: int) -> range:
        """Positions that the queries `start` to `end - 1` see in a group, including their own."""
        window = self._windows[group]
        return range(0 if window is None else max(0, start - window + 1), end)

    def read(self, tables: Tables, ids: Sequence[int], start: int, end: int, name: str) -> Tokens:
        """The tokens that attention finds for the queries `start` to `end - 1`. A misplaced one reads as another token.

        Positions that only earlier queries see do not affect the last token drawn, so they are checked here. `name`:
        the request, for errors.
        """
        size, read = self._size, list[dict[int, int]]()
        for group, table in enumerate(tables):
            tokens: dict[int, int] = {}
            for position in self.seen(group, start, end):
                block_id = table[position // size]
                cell = self.content[block_id][position % size] if block_id >= 0 else _POISON
                if cell in (_POISON, _NAN):
                    what = f"position {position} of {end} reads {'NaN' if cell == _NAN else 'poison'} in group {group}"
                    raise SimulationError(f"{name}: {what}, block size {size}")
                token_id, *place = cell
                tokens[position] = token_id if place == [position, group] else -token_id - 1
            for position in self.seen(group, start, self.seen(group, end - 1, end).start):
                if tokens[position] != ids[position]:
                    raise SimulationError(f"{name}: position {position} reads {tokens[position]}")
            read.append(tokens)
        return read

    def views(self, read: Tokens, end: int) -> Views:
        """The tokens that each group sees from the query at `end - 1`. A state is read by the number of its tokens."""
        return tuple(
            (tokens[end],) if self._windows[g] == STATE else tuple(tokens[i] for i in self.seen(g, end - 1, end))
            for g, tokens in enumerate(read)
        )
