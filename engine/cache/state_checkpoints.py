"""Checkpoints of recurrent states: which are free, which the prefix index can reach, and at which positions a sequence
leaves some.

A checkpoint is a copy of the state behind a block. Knows no tensors, no slots and no requests' ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from inferd.engine.cache.pool import BlockPool
from inferd.engine.cache.prefix import PrefixIndex


@dataclass(frozen=True, slots=True)
class StateCheckpointRules:
    """Bounds of the checkpoints of a cache."""

    num_checkpoints: int
    interval: int
    """Every sequence leaves a checkpoint at each multiple of so many tokens, which is a multiple of the block size."""


class StateCheckpoints:
    """The checkpoints of one cache. Its own references are to those that launched steps are about to write."""

    def __init__(self, rules: StateCheckpointRules) -> None:
        self.interval = rules.interval
        self.pool = BlockPool(rules.num_checkpoints)
        self._kept: set[int] = set()
        """Checkpoints that `supersede` leaves in their place."""

    def take(self, index: PrefixIndex, drop_blocks: Callable[[list[int]], None]) -> int | None:
        """A checkpoint to write, for which the one that was used least recently may be evicted. None if all are about
        to be written."""
        if not self.pool.num_empty:
            if not self.pool.num_cached:
                return None
            self._evict_oldest(index, drop_blocks)
        (checkpoint_id,) = self.pool.take(1)
        self._kept.discard(checkpoint_id)
        return checkpoint_id

    def evict_all(self, index: PrefixIndex, drop_blocks: Callable[[list[int]], None]) -> None:
        """Drop every checkpoint that no launched step writes."""
        while self.pool.num_cached:
            self._evict_oldest(index, drop_blocks)

    def _evict_oldest(self, index: PrefixIndex, drop_blocks: Callable[[list[int]], None]) -> None:
        evicted = self.pool.oldest_cached()
        drop_blocks(index.evict_checkpoint(evicted))
        self.pool.clear_content(evicted)

    def keep(self, checkpoint_id: int) -> None:
        """Count a checkpoint as used now, or if it is about to be written, as one that will be."""
        self._kept.add(checkpoint_id)
        if self.pool.has_content(checkpoint_id):
            self.pool.hold(checkpoint_id)
            self.pool.release(checkpoint_id)

    def supersede(self, checkpoint_id: int) -> None:
        """Evict this checkpoint next, because the same sequence has a later one. One that is kept stays."""
        if checkpoint_id not in self._kept:
            self.pool.make_oldest(checkpoint_id)


class Boundaries:
    """Positions at which one sequence leaves checkpoints, and those whose step was launched."""

    __slots__ = ("_interval", "_launched", "_wanted")

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._wanted: list[int] = []
        """Ascending."""
        self._launched: deque[tuple[int, int]] = deque()
        """(position, checkpoint) of steps that were not applied, ascending."""

    @property
    def launched(self) -> tuple[int, ...]:
        """Checkpoints that launched steps write."""
        return tuple(checkpoint_id for _, checkpoint_id in self._launched)

    def launched_before(self, position: int) -> tuple[int, int] | None:
        """(position, checkpoint) of the last one at `position` or before it that a launched step writes."""
        return next((found for found in reversed(self._launched) if found[0] <= position), None)

    def want(self, position: int) -> None:
        """Leave a checkpoint at `position`, which no row has reached."""
        if position not in self._wanted:
            self._wanted = sorted([*self._wanted, position])

    def after(self, position: int) -> int:
        """The next boundary behind `position`."""
        regular = (position // self._interval + 1) * self._interval
        return next((wanted for wanted in self._wanted if position < wanted < regular), regular)

    def has(self, position: int) -> bool:
        return position % self._interval == 0 or position in self._wanted

    def launch(self, position: int, checkpoint_id: int) -> None:
        """Count a checkpoint as written once the step that ends at `position` is applied."""
        self._launched.append((position, checkpoint_id))

    def is_due(self, num_computed: int) -> bool:
        return bool(self._launched) and self._launched[0][0] <= num_computed

    def take_due(self) -> tuple[int, int]:
        """The first (position, checkpoint) that was launched."""
        return self._launched.popleft()
