"""The flight record: shared memory that lists the requests of the launched steps.

The engine writes it before a step is launched, and clears it when the results have come. If the engine dies, the record
shows the step that was running. Engine and supervisor both map it, like the heartbeat. It holds no content of requests.
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
"""Most steps that are launched at once: the core plans one step ahead."""
_COUNT = struct.Struct("<Q")
_ROW = struct.Struct("<QQ")

Rows = Sequence[tuple[int, int]]
"""(tag of the request, number of positions that are computed when the step has run) of each row."""


def tag_of(request_id: str) -> int:
    """A 64-bit hash of a request id, the same in both processes."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little")


def flight_bytes(max_rows: int) -> int:
    """Bytes of a record for steps of up to `max_rows` rows."""
    return _NUM_STEPS * (_COUNT.size + max_rows * _ROW.size)


class FlightRecorder(Protocol):
    """Receives every step that the core launches."""

    def launched(self, step_id: int, rows: Rows, work: StepWork) -> None:
        """Called before a step is launched."""
        ...

    def ended(self, step_id: int) -> None:
        """Called when the step's results have come."""
        ...


class _NoRecorder:
    def launched(self, step_id: int, rows: Rows, work: StepWork) -> None:
        """Does nothing."""

    def ended(self, step_id: int) -> None:
        """Does nothing."""


NO_RECORDER: FlightRecorder = _NoRecorder()


class FlightRecord:
    """The engine's side, which writes."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: file descriptor of shared memory of `flight_bytes`."""
        self._map = open_map(descriptor)
        self._step_bytes = len(self._map) // _NUM_STEPS

    def launched(self, step_id: int, rows: Rows) -> None:
        """Record a step. The number of rows is written last, so that half-written rows do not count."""
        at = step_id % _NUM_STEPS * self._step_bytes
        _COUNT.pack_into(self._map, at, 0)
        struct.pack_into(f"<{2 * len(rows)}Q", self._map, at + _COUNT.size, *chain.from_iterable(rows))
        _COUNT.pack_into(self._map, at, len(rows))

    def ended(self, step_id: int) -> None:
        _COUNT.pack_into(self._map, step_id % _NUM_STEPS * self._step_bytes, 0)


class FlightReader:
    """The supervisor's side, which reads."""

    def __init__(self, descriptor: int) -> None:
        self._map = open_map(descriptor)
        self._step_bytes = len(self._map) // _NUM_STEPS

    def in_flight(self) -> dict[int, int]:
        """Tag -> positions, for every request in a step that was launched and has not ended."""
        found: dict[int, int] = {}
        for at in range(0, _NUM_STEPS * self._step_bytes, self._step_bytes):
            (num_rows,) = _COUNT.unpack_from(self._map, at)
            for row in range(num_rows):
                tag, end = _ROW.unpack_from(self._map, at + _COUNT.size + row * _ROW.size)
                found[tag] = max(end, found.get(tag, 0))
        return found

    def close(self) -> None:
        self._map.close()
