"""The engine's progress in shared memory: its loop writes it, and the supervisor reads it.

A hung engine answers no message, but how far it got can still be read. The loop writes each field itself, and no thread
writes for it. So an engine whose interpreter is held up shows no progress. Whether it could make any is for the kernel
to say (`processor_time`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from inferd.engine.api.process.death_notice import LOCK_BYTES
from inferd.engine.api.process.shared_memory import open_map


class EnginePhase(IntEnum):
    """Phase of the engine."""

    LOADING = 0
    STANDBY = 1
    """It waits to be promoted."""
    SERVING = 2


class Heartbeat(ctypes.Structure):
    """The engine's side: the shared memory itself. An assignment is visible to the other process at once."""

    num_beats: int
    step_started_s: float
    step_limit_s: float
    num_steps: int
    phase: int
    has_work: bool
    num_frames_sent: int
    num_frames_received: int
    _fields_ = (
        ("num_beats", ctypes.c_uint64),
        ("step_started_s", ctypes.c_double),
        ("step_limit_s", ctypes.c_double),
        ("num_steps", ctypes.c_uint64),
        ("phase", ctypes.c_uint64),
        ("has_work", ctypes.c_uint64),
        ("num_frames_sent", ctypes.c_uint64),
        ("num_frames_received", ctypes.c_uint64),
    )

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """`descriptor`: file descriptor of shared memory of `HEARTBEAT_BYTES`. The memory stays mapped."""
        heartbeat = cls.from_buffer(open_map(descriptor))
        heartbeat.num_beats = 1
        return heartbeat


LOCK_OFFSET = ctypes.sizeof(Heartbeat)
"""Place of the lock that the engine holds while it lives (`death_notice`)."""
HEARTBEAT_BYTES = LOCK_OFFSET + LOCK_BYTES


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


class HeartbeatReader:
    """The supervisor's side."""

    def __init__(self, descriptor: int) -> None:
        self._map = open_map(descriptor)

    def read(self) -> Pulse | None:
        """The state now; None before the first beat."""
        now = Heartbeat.from_buffer_copy(self._map)
        if not now.num_beats:
            return None
        return Pulse(
            num_beats=now.num_beats,
            step_started_s=now.step_started_s,
            step_limit_s=now.step_limit_s,
            num_steps=now.num_steps,
            phase=EnginePhase(now.phase),
            has_work=bool(now.has_work),
            num_frames_sent=now.num_frames_sent,
            num_frames_received=now.num_frames_received,
        )

    def close(self) -> None:
        self._map.close()
