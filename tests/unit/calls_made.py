"""Work counted in calls of functions, so that a test of it judges no time and ends by itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def at_most_calls(most: int) -> Iterator[None]:
    """Raises `AssertionError` inside, as soon as more functions of Python were called."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"
        assert num_calls <= most, f"more than {most} calls"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)
