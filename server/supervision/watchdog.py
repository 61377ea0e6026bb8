"""Tells a hung engine from a busy one by its heartbeat, and a lost frame from one that is under way.

A thread of the engine beats whatever its step does; a stopped process is silent. Time counts only while this process
runs itself, so after a suspension of both the engine has time to beat again. A beat carries how many frames the engine
has sent and received. A lost frame is noticed when the next one comes, and a lost last frame by that count.
"""

from __future__ import annotations

from inferd.engine.api.process.heartbeat import EnginePhase, Pulse
from inferd.engine.api.wire.client import FrameCounts

TICK_S = 0.25
"""How often to look."""
MAX_SILENCE_S = 5.0
"""Twenty missed beats."""
MAX_LATE_S = 3.0
"""Seconds that a frame may be late while both sides run and no other frame comes. A frame takes less than a
millisecond. But on a machine with eight times as much work as cores, the wire's thread may wait a second for a core."""
_FIRST_BEAT_S = 120.0
"""Enough for an interpreter to start and load its libraries, even from a cold disk."""
_MAX_TICK_S = 4 * TICK_S


class Watchdog:
    """Watches one engine."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._num_beats = self._num_steps = 0
        self._silent_s = self._step_s = 0.0
        self._to_server, self._to_engine = _Direction(), _Direction()
        self.is_step_endless = False
        """Whether `look` gave the engine up because a step ran too long."""

    def look(self, pulse: Pulse | None, now: float, frame_counts: FrameCounts) -> str | None:
        """Why the engine must be replaced, or None. Call it every tick.

        `frame_counts`: counters of the server's end of the wire.
        """
        passed_s, self._now = min(now - self._now, _MAX_TICK_S), now
        self._silent_s += passed_s
        if pulse is None:
            return f"gave no sign of life for {_FIRST_BEAT_S:g} s" if self._silent_s > _FIRST_BEAT_S else None
        has_run = pulse.num_beats != self._num_beats
        # A process that was stopped computes nothing meanwhile: only time around a beat counts for its step.
        ran_s = min(self._silent_s, _MAX_TICK_S) if has_run else 0.0
        if has_run:
            self._num_beats, self._silent_s = pulse.num_beats, 0.0
        if self._silent_s > MAX_SILENCE_S:
            return f"gave no sign of life for {MAX_SILENCE_S:g} s"
        is_same_step = pulse.step_started_s > 0.0 and pulse.num_steps == self._num_steps
        self._num_steps = pulse.num_steps
        self._step_s = self._step_s + ran_s if is_same_step else 0.0
        self.is_step_endless = is_same_step and self._step_s > pulse.step_limit_s > 0.0
        if self.is_step_endless:
            return f"has not ended a step within {pulse.step_limit_s:.0f} s"
        return self._lost(pulse, frame_counts, min(passed_s, TICK_S) if has_run else 0.0, is_same_step)

    def _lost(self, pulse: Pulse, frame_counts: FrameCounts, run_s: float, is_same_step: bool) -> str | None:
        """The frame that was lost, in words, or None. `run_s`: seconds since the last look in which both sides ran."""
        awaited_s = run_s if frame_counts.is_awaited else 0.0
        if self._to_server.is_lost(pulse.num_frames_sent, frame_counts.num_received, awaited_s):
            return f"has sent frame {frame_counts.num_received}, which never came"
        # A serving engine reads between two steps.
        awaited_s = run_s if pulse.phase is EnginePhase.SERVING and not is_same_step else 0.0
        if self._to_engine.is_lost(frame_counts.num_sent, pulse.num_frames_received, awaited_s):
            return f"was sent frame {pulse.num_frames_received}, which it has never seen"
        return None


class _Direction:
    """One direction of the wire."""

    def __init__(self) -> None:
        self._num_received = 0
        self._late_s = 0.0

    def is_lost(self, num_sent: int, num_received: int, awaited_s: float) -> bool:
        """Whether a frame was sent and does not come. `awaited_s`: seconds more in which it should have come."""
        if num_received >= num_sent or num_received != self._num_received:
            self._num_received, self._late_s = num_received, 0.0
        else:
            self._late_s += awaited_s
        return self._late_s > MAX_LATE_S
