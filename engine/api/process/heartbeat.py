"""The engine's heartbeat in shared memory: a thread of the engine process writes it, the supervisor reads it.

A hung engine answers no message, but its last beat can still be read. A long step does not stop the beat, because it
comes from a thread of its own; stopping the process does.
"""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Self

from inferd.engine.api.process.death_notice import LOCK_BYTES
from inferd.engine.api.process.shared_memory import open_map

_LAYOUT = struct.Struct("<QdddQBBQQ")
LOCK_OFFSET = 64
"""Place of the lock that the engine holds while it lives (`death_notice`)."""
HEARTBEAT_BYTES = LOCK_OFFSET + LOCK_BYTES
BEAT_INTERVAL_S = 0.25


class EnginePhase(IntEnum):
    """Phase of the engine. While it is loading, only the beat counts."""

    LOADING = 0
    SERVING = 1
    STOPPING = 2


@dataclass(frozen=True, slots=True)
class Pulse:
    """One reading of the heartbeat. Times are of the monotonic clock, which all processes of a machine share."""

    num_beats: int
    beat_s: float
    step_started_s: float
    """Time when the step in flight was launched; 0.0 if there is none."""
    step_limit_s: float
    """Seconds that the step may take before it counts as hung."""
    num_steps: int
    phase: EnginePhase
    has_work: bool
    num_frames_sent: int = 0
    """Number of frames sent to the server. With it the server notices a lost last frame, which no later frame shows."""
    num_frames_received: int = 0


class Heartbeat:
    """The engine's side: a thread that beats, and fields that the core loop updates."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: file descriptor of shared memory of `HEARTBEAT_BYTES`."""
        self._map = open_map(descriptor)
        self._stopped = threading.Event()
        self._num_beats = 0
        self.phase = EnginePhase.LOADING
        self.step_started_s = 0.0
        self.step_limit_s = 0.0
        self.num_steps = 0
        self.has_work = False
        self.num_frames_sent = self.num_frames_received = 0
        self._thread = threading.Thread(target=self._run, name="inferd-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self._map.close()

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_INTERVAL_S):
            self._beat()

    def _beat(self) -> None:
        self._num_beats += 1
        _LAYOUT.pack_into(
            self._map,
            0,
            self._num_beats,
            time.monotonic(),
            self.step_started_s,
            self.step_limit_s,
            self.num_steps,
            self.phase,
            self.has_work,
            self.num_frames_sent,
            self.num_frames_received,
        )


class HeartbeatReader:
    """The supervisor's side."""

    def __init__(self, descriptor: int) -> None:
        self._map = open_map(descriptor)

    def read(self) -> Pulse | None:
        """The last beat; None before the first."""
        beats, beat_s, started_s, limit_s, steps, phase, has_work, *frames = _LAYOUT.unpack_from(self._map, 0)
        if not beats:
            return None
        return Pulse(beats, beat_s, started_s, limit_s, steps, EnginePhase(phase), bool(has_work), *frames)

    def close(self) -> None:
        self._map.close()
