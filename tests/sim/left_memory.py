"""The memory that the server of a simulated replica keeps from engine to engine: the blocks and checkpoints of the
device, and the ledger of them.

Between two engines it may be damaged, as memory is that a failing engine wrote to. Then the ledger finds that out by
comparing what was written down with what is there. If nothing is damaged, the ledger believes every entry. So an entry
that the cache should have erased gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from inferd.engine.cache.ledger import Entry
from tests.sim.cells import Cell, Cells
from tests.sim.states import State, States

Content = list[Cell] | State


@dataclass(frozen=True, slots=True)
class _Record:
    entry: Entry
    content: Content


class LeftMemory:
    """The memory of one replica, and its `Ledger`."""

    def __init__(self, rng: Random, *, is_lost: bool = False) -> None:
        self._rng = rng
        self._is_damaged = rng.random() < 0.5
        self.is_lost = is_lost
        """Whether nothing is left, as on a GPU."""
        self._records: dict[int, _Record] = {}
        self._cells: Cells | None = None
        self._states: States | None = None
        self.num_taken = 0
        """Places whose content a later engine found sound."""
        self.num_refused = 0

    def take_over(self, cells: Cells, states: States | None) -> tuple[Cells, States | None]:
        """The memory of the next engine's device: what the one before left, or that of the first."""
        if self._cells is None or self.is_lost:
            self._cells, self._states = cells, states
        if self._states is not None:
            self._states = self._states.left()
        return self._cells, self._states

    def damage(self) -> None:
        """Between two engines, in every other run: write to some places, and exchange what was written down of two."""
        if self.is_lost:
            self._records.clear()
        places = sorted(self._records) if self._is_damaged else []
        for place in places:
            if self._rng.random() < 0.1:
                self.put(place, self.content(self._rng.choice(places)))
        if len(places) > 1:
            first, second = self._rng.sample(places, 2)
            one, other = self._records[first], self._records[second]
            if one.entry.group != other.entry.group:
                return
            self._records[first] = _Record(other.entry._replace(place=first), other.content)
            self._records[second] = _Record(one.entry._replace(place=second), one.content)

    def content(self, place: int) -> Content:
        assert self._cells is not None
        if place < len(self._cells.content):
            return list(self._cells.content[place])
        assert self._states is not None
        return self._states.content[place - len(self._cells.content)]

    def put(self, place: int, content: Content) -> None:
        assert self._cells is not None
        if place < len(self._cells.content):
            if isinstance(content, list):
                self._cells.content[place] = list(content)
        elif not isinstance(content, list):
            assert self._states is not None
            self._states.put(place - len(self._cells.content), content)

    # -- the ledger --------------------------------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        return (record.entry for record in list(self._records.values()))

    def is_sound(self, entry: Entry) -> bool:
        record = self._records[entry.place]
        is_sound = not self._is_damaged or (record.entry == entry and record.content == self.content(entry.place))
        self.num_taken += is_sound
        self.num_refused += not is_sound
        return is_sound

    def write(self, entry: Entry) -> None:
        self._records[entry.place] = _Record(entry, self.content(entry.place))

    def touch(self, place: int, use: int) -> None:
        record = self._records[place]
        self._records[place] = _Record(record.entry._replace(use=use), record.content)

    def erase(self, place: int) -> None:
        self._records.pop(place, None)
