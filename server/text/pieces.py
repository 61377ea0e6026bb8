"""Long sequences piece by piece, for work that a thread does on all of their items.

One call of C's over a sequence holds the interpreter lock until it is done: 50 ms for the types of two million ids (an
Intel Xeon, 2026-11-22). Between pieces others run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

_PIECE = 65_536


def pieces(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(values), _PIECE):
        yield values[first : first + _PIECE]
