"""Keeps the flight record and the heartbeat's limit current: which requests are computed now, and when a step counts as
hung.

A step may take ten times its prediction, which is ten times the floor of the roofline. The slowest kernels that serve,
those in plain PyTorch, are within that. The first step of a size may also compile and record.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferd.engine.api.cost.roofline import Peaks, StepPhase
from inferd.engine.api.cost.step_cost import StepWork
from inferd.engine.api.process.flight_recorder import FlightRecord, Rows
from inferd.engine.api.process.heartbeat import Heartbeat

_MIN_S = 10.0
"""Shortest limit of a step."""
_FIRST_S = 120.0
"""Shortest limit of the first step of a size."""
_PREDICTED_FLOORS = 10.0
_MAX_PREDICTIONS = 10.0

_Size = tuple[StepPhase, int]
"""Phase of a step, and its FLOPs to the next power of two."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    size: _Size
    limit_s: float


class StepWatch:
    """The core's recorder in a process with a watchdog."""

    def __init__(self, flight: FlightRecord, heartbeat: Heartbeat, peaks: Peaks) -> None:
        self._flight, self._heartbeat, self._peaks = flight, heartbeat, peaks
        self._in_flight: dict[int, _InFlight] = {}
        self._seen: set[_Size] = set()
        self._set_limit()  # a step may hang before the first launch, too

    def launched(self, step_id: int, rows: Rows, work: StepWork) -> None:
        """Called before a step is launched. From here on its requests are suspects if the engine crashes."""
        size = work.phase, work.flops.bit_length()
        predicted_s = _PREDICTED_FLOORS * self._peaks.floor_s(work.flops, work.num_bytes)
        least_s = _MIN_S if size in self._seen else _FIRST_S
        self._in_flight[step_id] = _InFlight(size, max(least_s, _MAX_PREDICTIONS * predicted_s))
        self._set_limit()
        self._flight.launched(step_id, rows)

    def ended(self, step_id: int) -> None:
        """Called when the results of a step have come."""
        self._flight.ended(step_id)
        self._seen.add(self._in_flight.pop(step_id).size)
        self._set_limit()

    def _set_limit(self) -> None:
        """Set the limit to the longest one in flight: the core waits for the oldest step, and the next may already run
        behind it."""
        self._heartbeat.step_limit_s = max((step.limit_s for step in self._in_flight.values()), default=_FIRST_S)
