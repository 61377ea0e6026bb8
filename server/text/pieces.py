"""Splits a long sequence into pieces, for a thread that works on all of its items.

One C call over a sequence holds the interpreter lock until it is done: 50 ms for the types of two million ids (Intel
Xeon, 2026-11-22). Other threads run between two pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

_PIECE = 65_536


def pieces(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(values), _PIECE):
        yield values[first : first + _PIECE]
