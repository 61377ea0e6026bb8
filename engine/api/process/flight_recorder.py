"""What the engine is computing, in shared memory: which requests the launched steps hold, and how long they may take.

Written before a step is launched and cleared when its results have come, so that what stands there after a death is the
step that died. Engine and supervisor both map it, as they map the heartbeat. Knows no step's content.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from inferd.engine.api.cost.step_cost import StepWork
from inferd.engine.api.process.shared_memory import open_map

_NUM_STEPS = 2
"""Launched at once, at most: the core plans one step ahead."""
_COUNT = struct.Struct("<Q")
_ROW = struct.Struct("<QQ")

Rows = Sequence[tuple[int, int]]
"""(tag of the request, positions that are computed once the step has run) of each row."""


def tag_of(request_id: str) -> int:
    """64 bits that stand for a request id, in both processes."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


def flight_bytes(max_rows: int) -> int:
    """What a record of steps of up to `max_rows` rows takes."""
    return _NUM_STEPS * (_COUNT.size + max_rows * _ROW.size)


class Recorder(Protocol):
    """Is told of every step."""

    def launched(self, step_id: int, rows: Rows, work: StepWork) -> None:
        """A step is about to be launched."""
        ...

    def ended(self, step_id: int) -> None:
        """Its results have come."""
        ...


class _NoRecorder:
    def launched(self, step_id: int, rows: Rows, work: StepWork) -> None:
        """Nobody asks."""

    def ended(self, step_id: int) -> None:
        """Nobody asks."""


NO_RECORDER: Recorder = _NoRecorder()


class FlightRecord:
    """The engine's side."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of `flight_bytes` in shared memory."""
        self._map = open_map(descriptor)
        self._step_bytes = len(self._map) // _NUM_STEPS

    def launched(self, step_id: int, rows: Rows) -> None:
        """The count is written last: rows that are only half there do not count."""
        at = step_id % _NUM_STEPS * self._step_bytes
        _COUNT.pack_into(self._map, at, 0)
        struct.pack_into(f"<{2 * len(rows)}Q", self._map, at + _COUNT.size, *chain.from_iterable(rows))
        _COUNT.pack_into(self._map, at, len(rows))

    def ended(self, step_id: int) -> None:
        _COUNT.pack_into(self._map, step_id % _NUM_STEPS * self._step_bytes, 0)


class FlightReader:
    """The supervisor's side."""

    def __init__(self, descriptor: int) -> None:
        self._map = open_map(descriptor)
        self._step_bytes = len(self._map) // _NUM_STEPS

    def in_flight(self) -> dict[int, int]:
        """Tag -> positions, of every request in a step that was launched and has not ended."""
        found: dict[int, int] = {}
        for at in range(0, _NUM_STEPS * self._step_bytes, self._step_bytes):
            (num_rows,) = _COUNT.unpack_from(self._map, at)
            for row in range(num_rows):
                tag, end = _ROW.unpack_from(self._map, at + _COUNT.size + row * _ROW.size)
                found[tag] = max(end, found.get(tag, 0))
        return found

    def close(self) -> None:
        self._map.close()
