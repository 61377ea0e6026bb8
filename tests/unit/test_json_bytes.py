"""What is kept, or waits for a slow reader, takes as much memory as it counts."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import orjson
import pytest

from inferd.server.text.json_bytes import exact

OBJECT_BYTES = 96
"""Of an object of bytes beside what it holds, at most."""


def taken_by(make: Callable[[], bytes]) -> tuple[bytes, int]:
    """What it makes, and how many bytes Python's allocator gave for it and still has in use."""
    tracemalloc.start()
    try:
        made = make()
        return made, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [1, 100, 1_000, 10_000, 100_000])
def test_exact_bytes_take_their_length(length: int) -> None:
    value = {"text": "x" * length}
    encoded, roomy = taken_by(lambda: orjson.dumps(value))
    same, taken = taken_by(lambda: exact(orjson.dumps(value)))
    assert same == encoded
    assert len(encoded) <= taken <= len(encoded) + OBJECT_BYTES
    assert roomy > taken + 100, "the encoder leaves no room any more: `exact` is no longer needed"
