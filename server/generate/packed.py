"""A growing collection kept as MessagePack. Log probabilities take a tenth of their size as objects."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

import msgspec

from inferd.server.schema.json_bytes import exact

T = TypeVar("T")

_AT_ONCE = 64
"""Values in a pack. With 20 alternatives, 64 scored tokens take 20 KB packed, and 200 KB while they are read."""
_pack = msgspec.msgpack.Encoder().encode


class Packed(Collection[T]):
    """Values in packs of 64. Each iteration unpacks them again, one pack at a time."""

    __slots__ = ("_decoder", "_num_packed", "_open", "_packs")

    def __init__(self, decoder: msgspec.msgpack.Decoder[tuple[T, ...]], first: Sequence[T] = ()) -> None:
        self._decoder = decoder
        self._packs: list[bytes] = []
        self._num_packed = 0
        self._open = list(first)

    def extend(self, values: Sequence[T]) -> None:
        self._open += values
        if len(self._open) < _AT_ONCE:
            return
        num_left = len(self._open) % _AT_ONCE
        for start in range(0, len(self._open) - num_left, _AT_ONCE):
            self._packs.append(exact(_pack(self._open[start : start + _AT_ONCE])))
            self._num_packed += _AT_ONCE
        self._open = self._open[len(self._open) - num_left :]

    def __len__(self) -> int:
        return self._num_packed + len(self._open)

    def __iter__(self) -> Iterator[T]:
        for pack in self._packs:
            yield from self._decoder.decode(pack)
        yield from self._open

    def __contains__(self, value: object) -> bool:
        return any(value == other for other in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Packed) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
