"""The engine's progress in shared memory: its loop writes it, and the supervisor reads it.

A hung engine answers no message, but how far it got can still be read. The loop writes each field itself, and no thread
writes for it. So an engine whose interpreter is held up shows no progress. Whether it could make any is for the kernel
to say (`processor_time`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Self

from inferd.engine.api.process.death_notice import LOCK_BYTES
from inferd.engine.api.process.shared_memory import open_map

LOCK_OFFSET = 64
"""Place of the lock that the engine holds while it lives (`death_notice`)."""
HEARTBEAT_BYTES = LOCK_OFFSET + LOCK_BYTES


class EnginePhase(IntEnum):
    """Phase of the engine."""

    LOADING = 0
    STANDBY = 1
    """It waits to be promoted."""
    SERVING = 2


class _Count:
    """A whole number in shared memory. An assignment is visible to the other process at once."""

    def __init__(self, place: int) -> None:
        """`place`: index among the numbers of eight bytes."""
        self._place = place

    def __get__(self, owner: _Shared, _: type[_Shared]) -> int:
        return owner.counts[self._place]

    def __set__(self, owner: _Shared, value: int) -> None:
        owner.counts[self._place] = value


class _Seconds:
    """A time in shared memory, as `_Count`."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, owner: _Shared, _: type[_Shared]) -> float:
        return owner.seconds[self._place]

    def __set__(self, owner: _Shared, value: float) -> None:
        owner.seconds[self._place] = value


class _Shared:
    """The memory, seen as whole numbers and as seconds."""

    num_beats = _Count(0)
    step_started_s = _Seconds(1)
    step_limit_s = _Seconds(2)
    num_steps = _Count(3)
    phase = _Count(4)
    has_work = _Count(5)
    num_frames_sent = _Count(6)
    num_frames_received = _Count(7)

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: file descriptor of shared memory of `HEARTBEAT_BYTES`."""
        self._map = open_map(descriptor)
        numbers = memoryview(self._map)[:LOCK_OFFSET]
        self.counts, self.seconds = numbers.cast("Q"), numbers.cast("d")
        numbers.release()

    def close(self) -> None:
        for view in (self.counts, self.seconds):
            view.release()
        self._map.close()


@dataclass(frozen=True, slots=True)
class Pulse:
    """One reading of the heartbeat."""

    num_beats: int
    """Number of turns of the engine's loop. An idle loop turns once a second. The first beat comes before it loads."""
    step_started_s: float
    """Time when the step in flight was launched (monotonic); 0.0 if there is none."""
    step_limit_s: float
    """Seconds that the step may take before it counts as hung."""
    num_steps: int
    phase: EnginePhase
    has_work: bool
    num_frames_sent: int = 0
    """Number of frames sent to the server. With it the server notices a lost last frame, which no later frame shows."""
    num_frames_received: int = 0


class Heartbeat(_Shared):
    """The engine's side."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.beat()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def beat(self) -> None:
        """Called at each turn of the loop."""
        self.num_beats += 1


class HeartbeatReader(_Shared):
    """The supervisor's side."""

    def read(self) -> Pulse | None:
        """The state now; None before the first beat."""
        if not self.num_beats:
            return None
        return Pulse(
            num_beats=self.num_beats,
            step_started_s=self.step_started_s,
            step_limit_s=self.step_limit_s,
            num_steps=self.num_steps,
            phase=EnginePhase(self.phase),
            has_work=bool(self.has_work),
            num_frames_sent=self.num_frames_sent,
            num_frames_received=self.num_frames_received,
        )
