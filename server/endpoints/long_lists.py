"""Writes JSON documents with long lists in pieces, so that the whole document is never in memory.

The largest answer has 742,400 log probabilities. They are 55 MiB of JSON, or 300 MiB of Python objects. No other thread
runs while orjson encodes or bytes are copied, so each piece is short.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from typing import Generic, TypeVar

import orjson

T = TypeVar("T")

PIECE_BYTES = 64 * 1024
_ENCODED_AT_ONCE = 64
"""Number of entries that are encoded at once. With 20 alternatives, 64 tokens are 100 KB of JSON."""


class Chained(Generic[T]):
    """Several collections as one, which can be read more than once."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: Collection[T]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts)

    def __contains__(self, item: object) -> bool:
        return any(item in part for part in self._parts)


class LongList(Generic[T]):
    """A list in a document. Its entries are made and encoded while the document is written, 64 at a time."""

    __slots__ = ("_items", "_show")

    def __init__(self, items: Collection[T], show: Callable[[T], object]) -> None:
        """`show` makes the entry of an item. `items` is read again each time the document is written."""
        self._items, self._show = items, show

    def encoded(self) -> Iterator[bytes]:
        left = iter(self._items)
        before = b"["
        while entries := [self._show(item) for item in islice(left, _ENCODED_AT_ONCE)]:
            yield before
            yield orjson.dumps(entries)[1:-1]
            before = b","
        yield b"]" if before == b"," else b"[]"


def pieces(document: object) -> Iterator[bytes]:
    """The JSON of `document` in pieces of `PIECE_BYTES` or a little more. The last piece may be shorter.

    `document` contains values that orjson can write, and `LongList`s.
    """
    gathered = bytearray()
    for part in _parts(document):
        gathered += part
        if len(gathered) >= PIECE_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)


def dumps(document: object) -> bytes:
    """The same JSON in one piece. A chunk of a stream, which has no long list, is written in a tenth of the time."""
    try:
        return orjson.dumps(document)
    except TypeError:  # of a `LongList`, or of what is no JSON, which raises it again
        return b"".join(_parts(document))


def _parts(document: object) -> Iterator[bytes]:
    # orjson writes the mark in place of each long list. No other text in the document can contain 128 random bits.
    mark = secrets.token_hex(16).encode()
    lists: list[LongList[object]] = []

    def marked(value: object) -> orjson.Fragment:
        if not isinstance(value, LongList):
            raise TypeError(f"a {type(value).__name__} is not JSON")
        lists.append(value)
        return orjson.Fragment(mark)

    encoded = orjson.dumps(document, default=marked)
    if not lists:
        yield encoded
        return
    first, *others = encoded.split(mark)
    yield first
    for long, after in zip(lists, others, strict=True):
        yield from long.encoded()
        yield after
