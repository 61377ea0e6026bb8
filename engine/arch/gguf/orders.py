"""Orders of the rows or the columns of a matrix in GGUF files, if they differ from the original ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows of q or k in pairs: the two that rotary embedding turns together follow one another. So row i of a head is
    followed by its row i + half of the head."""

    num_heads: int

    def places(self, num_rows: int) -> list[int]:
        """The place in the file of each of `num_rows` original rows."""
        size = num_rows // self.num_heads
        head = [*range(0, size, 2), *range(1, size, 2)]
        return [first + row for first in range(0, self.num_heads * size, size) for row in head]


@dataclass(frozen=True, slots=True)
class TiledHeads:
    """Value heads of a Gated DeltaNet, several of which share a key head. The original has those of one key head side
    by side. A file has the first of every key head, then the second of every key head, and so on."""

    num_key_heads: int
    share: int
    """Number of value heads that share a key head."""
    head_size: int = 1
    """Number of rows or columns of a value head."""
    first: int = 0
    """Number of rows before those of value heads. They have their original order."""

    def places(self, num_rows: int) -> list[int]:
        """As of `Pairs`."""
        heads = [tile * self.num_key_heads + key for key in range(self.num_key_heads) for tile in range(self.share)]
        starts = [self.first + head * self.head_size for head in heads]
        return [*range(self.first), *(start + row for start in starts for row in range(self.head_size))]

    def of_groups(self, group_size: int) -> TiledHeads | None:
        """The order of groups of columns that share a scale; None if a head is no whole number of groups."""
        if self.head_size % group_size or self.first % group_size:
            return None
        return TiledHeads(self.num_key_heads, self.share, self.head_size // group_size, self.first // group_size)


Order = Pairs | TiledHeads
