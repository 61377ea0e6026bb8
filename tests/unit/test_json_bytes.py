"""Bytes that are kept, or wait for a slow reader, take as much memory as is counted for them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import orjson
import pytest

from inferd.server.schema.strict_json import exact

OBJECT_BYTES = 96
"""Most bytes that a bytes object takes beside its content."""


def taken_by(make: Callable[[], bytes]) -> tuple[bytes, int]:
    """The function's result, and the bytes that Python's allocator gave for it and that are still in use."""
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
