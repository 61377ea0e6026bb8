"""Keeps the flight record and the heartbeat's limit current: what is computed now, and when that counts as hung.

A step may take ten times what is predicted for it, and the prediction is ten times the floor of the roofline: the
slowest kernels that serve, plain PyTorch ones, are within that. The first step of a size may also compile and record.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferd.engine.api.cost.roofline import Peaks, StepPhase
from inferd.engine.api.cost.step_cost import StepWork
from inferd.engine.api.process.flight_recorder import FlightRecord, Rows
from inferd.engine.api.process.heartbeat import Heartbeat

_MIN_S = 10.0
"""No step counts as hung before."""
_FIRST_S = 120.0
"""Nor one of a size that no step had before."""
_PREDICTED_FLOORS = 10.0
_MAX_PREDICTIONS = 10.0

_Size = tuple[StepPhase, int]
"""What a step was, and its FLOPs to the next power of two."""


@dataclass(frozen=True, slots=True)
class _Flying:
    size: _Size
    limit_s: float


class StepWatch:
    """The core's recorder in a process that is watched."""

    def __init__(self, flight: FlightRecord, heartbeat: Heartbeat, peaks: Peaks) -> None:
        self._flight, self._heartbeat, self._peaks = flight, heartbeat, peaks
        self._flying: dict[int, _Flying] = {}
        self._seen: set[_Size] = set()
        self._tell()  # what hangs before the first launch hangs too

    def launched(self, step_id: int, rows: Rows, work: StepWork) -> None:
        """Before a step is launched: from here on its requests are suspects if the engine dies."""
        size = work.phase, work.flops.bit_length()
        predicted_s = _PREDICTED_FLOORS * self._peaks.floor_s(work.flops, work.num_bytes)
        least_s = _MIN_S if size in self._seen else _FIRST_S
        self._flying[step_id] = _Flying(size, max(least_s, _MAX_PREDICTIONS * predicted_s))
        self._tell()
        self._flight.launched(step_id, rows)

    def ended(self, step_id: int) -> None:
        """Its results have come."""
        self._flight.ended(step_id)
        self._seen.add(self._flying.pop(step_id).size)
        self._tell()

    def _tell(self) -> None:
        """The core waits for the oldest step, behind which the next one may already run."""
        self._heartbeat.step_limit_s = max((flying.limit_s for flying in self._flying.values()), default=_FIRST_S)
