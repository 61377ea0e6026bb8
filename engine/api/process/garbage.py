"""Settings of Python's garbage collector, which looks for unreachable cycles, in a process that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (20_000, 20, 20)
"""Thresholds for `gc.set_threshold`. They can be high, because neither a token nor a request makes a cycle: their
objects die with their last reference. With one cycle a request, megabytes would gather (`tests/api/test_garbage`)."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Switches the collector off while libraries are imported, and then exempts their objects from it for good.

    Otherwise it would scan hundreds of thousands of lasting objects again and again. 7,000 of 190,000 objects are
    garbage and stay too. An engine imports its libraries in 1.27 s of processor time instead of 1.60, the server in
    1.13 instead of 1.29 (medians of seven; 2 cores of an AMD EPYC Zen 4, Python 3.11, torch 2.13, 2026-11-22).
    """
    was_watched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # otherwise the next new object starts a collection of all of them
        if was_watched:
            gc.enable()


def freeze_objects() -> None:
    """Call at the end of a start: collects once more, and then exempts all present objects from the collector.

    Otherwise every full collection scans all objects of torch, FastAPI and pydantic in the middle of an answer. With
    256 streams that took a sixth of the server's time. It stopped the event loop for 110 ms, on a busy machine for up
    to half a second (100,000 objects; 2 cores of an AMD EPYC Zen 4, Python 3.11, 2026-11-21).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
