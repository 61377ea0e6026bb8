"""A simulated tier: pieces of one replica that outlive its engines, found and loaded after a while, or not at all.

The tier writes into the device's blocks when a load ends, as a thread does beside the steps. A load that
fails has written something else there. A piece is copied some time after it was offered, if its places still hold it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from inferd.engine.cache.below import Found, Piece, TierUse
from inferd.engine.cache.prefix import GONE
from tests.sim.left_memory import Content, LeftMemory

_LOOKS = (0, 1, 3, 30, 100)
"""Times that the engine looks until a piece has ended, a millisecond apart if it is idle."""


@dataclass(slots=True)
class _Waits:
    """Something that is done after some looks at it."""

    num_looks: int

    def look(self) -> bool:
        self.num_looks -= 1
        return self.num_looks < 0


@dataclass(slots=True)
class _Search(_Waits):
    found: list[Found] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.look()

    def take(self) -> Sequence[Found]:
        return self.found


class _Load(_Waits):
    def __init__(self, tier: SimulatedTier, jobs: list[tuple[list[Content | None], Sequence[int]]]) -> None:
        super().__init__(tier.rng.choice(_LOOKS))
        self._tier, self._jobs, self.is_stopped = tier, deque(jobs), False

    @property
    def has_ended(self) -> bool:
        return bool(self._jobs) and self.look()

    def take_ended(self) -> Sequence[bool]:
        rng, ended = self._tier.rng, list[bool]()
        while self._jobs and (not ended or rng.random() < 0.5):
            rows, places = self._jobs.popleft()
            is_whole = not self.is_stopped and rng.random() < 0.9
            if not is_whole:
                rows = [rng.choice(rows) for _ in rows]
            for content, place in zip(rows, places, strict=True):
                if place != GONE and content is not None:
                    self._tier.memory.put(place, content)
            ended.append(is_whole)
        self.num_looks = rng.choice(_LOOKS)
        return ended

    def stop(self) -> None:
        self.is_stopped = True


class _Comparing(_Waits):
    def __init__(self, tier: SimulatedTier, kept: tuple[str, Piece], places: Sequence[int]) -> None:
        super().__init__(tier.rng.choice(_LOOKS))
        self._tier, self._kept, self._places = tier, kept, places
        self._is_ended = False

    @property
    def is_done(self) -> bool:
        self._is_ended |= self.look()
        return self._is_ended

    def take(self) -> bool | None:
        """It looks at the places only now: they must still hold what was computed."""
        rows = self._tier.rows_of(self._kept)
        if rows is None:
            return None
        memory = self._tier.memory
        for row, place in zip(rows, self._places, strict=True):
            if place != GONE and row is not None:
                assert memory.content(place) == row, f"place {place}: computed again, it is not what was kept"
        self._tier.num_same += 1
        return True


class SimulatedTier:
    """The tier of one replica."""

    def __init__(self, rng: Random, memory: LeftMemory) -> None:
        self.rng, self.memory = rng, memory
        self._kept: dict[tuple[str, Piece], list[Content | None]] = {}
        self._offered: deque[tuple[str, Piece, Sequence[int], int]] = deque()
        self.num_loads = self.num_same = 0
        """`num_same`: pieces that were computed again."""
        self.use = TierUse()
        self.news: deque[tuple[Piece | None, bool]] | None = None

    def begin(self, num_erased: Callable[[Iterable[int]], int]) -> None:
        """Another engine begins: what was not copied yet is lost. `num_erased`: that of its cache."""
        self._offered.clear()
        self._num_erased = num_erased

    def seek(self, salt: str, wanted: Sequence[Sequence[Piece]]) -> _Search:
        self._write()
        found: list[Found] = []
        for pieces in wanted:
            piece = next((piece for piece in pieces if (salt, piece) in self._kept), None)
            if piece is None:
                break
            found.append(Found(piece, tuple(int(row is not None) for row in self._kept[salt, piece])))
        return _Search(self.rng.randint(0, 3), found)

    def load(self, salt: str, found: Sequence[Found], places: Sequence[Sequence[int]]) -> _Load:
        self.num_loads += len(found)
        return _Load(self, [(self._kept[salt, each.piece], rows) for each, rows in zip(found, places, strict=True)])

    def offer(self, salt: str, piece: Piece, places: Sequence[int]) -> None:
        self._offered.append((salt, piece, places, self._num_erased(places)))
        if self.rng.random() < 0.5:
            self._write()

    def _write(self) -> None:
        while self._offered:
            salt, piece, places, num_erased = self._offered.popleft()
            if self._num_erased(places) == num_erased:
                self._kept[salt, piece] = [None if place == GONE else self.memory.content(place) for place in places]

    def clear(self) -> None:
        self._offered.clear()
        self._kept.clear()

    def forget(self, salt: str, keys: Sequence[bytes]) -> None:
        self._offered = deque(each for each in self._offered if each[1].key not in keys)
        self._kept = {kept: rows for kept, rows in self._kept.items() if kept[1].key not in keys}

    def compare(self, salt: str, piece: Piece, places: Sequence[int]) -> _Comparing:
        return _Comparing(self, (salt, piece), places)

    def rows_of(self, kept: tuple[str, Piece]) -> list[Content | None] | None:
        return self._kept.get(kept)

    def distrust(self) -> None:
        """Nothing is wrong here."""

    def seconds_to_load(self, salt: str, found: Sequence[Found]) -> float:
        return self.rng.choice((0.0, 0.0, 1e9))
