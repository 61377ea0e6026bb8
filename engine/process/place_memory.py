"""The port through which tiers reach the memory of the pool's places.

A tier reads and writes the memory of a CPU's pool itself, and copies that of a GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from inferd.engine.api.kv_store.segment import Blocks
from inferd.engine.cache.prefix import GONE

Row = tuple[int, int] | None
"""(place, cache group) of a row of a piece. A checkpoint's group is the number of groups. None for a row without
content."""


class PlaceMemory(Protocol):
    """The memory of blocks and checkpoints. Threads beside the engine's loop use it."""

    @property
    def row_layout(self) -> str:
        """How the bytes of a place lie, as text that differs if they would mean something else."""
        ...

    def row_bytes(self, place: int, group: int) -> int:
        """Number of bytes of a place."""
        ...

    def buffers(self, rows: Sequence[Row]) -> Blocks:
        """Host memory for the bytes of these places: their own memory, or memory of the calling thread that its next
        call gives out again."""
        ...

    def fetch(self, rows: Sequence[Row], buffers: Blocks) -> bool:
        """Fill host memory with the bytes of these places. Returns whether it is a copy: then it stays as it is when
        the places change. All of it has arrived when this returns."""
        ...

    def store(self, rows: Sequence[Row], buffers: Blocks) -> None:
        """Fill places with these bytes, which a step that is launched later sees. Nobody else may use the places."""
        ...


def rows_of(places: Sequence[int], num_groups: int) -> list[Row]:
    """The rows of a piece whose places are these: those of its blocks by cache group, and the checkpoint's."""
    groups = [*(row % num_groups for row in range(len(places) - 1)), num_groups]
    return [None if place == GONE else (place, group) for place, group in zip(places, groups, strict=True)]
