"""Tells a hung engine from a busy one by its heartbeat, without asking it.

A thread of the engine beats whatever its step does; a stopped process is silent. Times count only while this process
runs itself: after both were suspended the engine has time to beat again.
"""

from __future__ import annotations

from inferd.engine.api.heartbeat import Pulse

TICK_S = 0.25
"""How often to look."""
MAX_SILENCE_S = 5.0
"""Twenty missed beats."""
_FIRST_BEAT_S = 120.0
"""Until then an interpreter has started and read its libraries, from a cold disk too."""
_MAX_TICK_S = 4 * TICK_S


class Watchdog:
    """Over one engine."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._num_beats = self._num_steps = 0
        self._silent_s = self._step_s = 0.0

    def look(self, pulse: Pulse | None, now: float) -> str | None:
        """Why the engine counts as hung, or None. To be called every tick."""
        passed_s, self._now = min(now - self._now, _MAX_TICK_S), now
        self._silent_s += passed_s
        if pulse is None:
            return f"gave no sign of life for {_FIRST_BEAT_S:g} s" if self._silent_s > _FIRST_BEAT_S else None
        if pulse.num_beats != self._num_beats:
            self._num_beats, self._silent_s = pulse.num_beats, 0.0
        if self._silent_s > MAX_SILENCE_S:
            return f"gave no sign of life for {MAX_SILENCE_S:g} s"
        is_same_step = pulse.step_started_s > 0.0 and pulse.num_steps == self._num_steps
        self._num_steps = pulse.num_steps
        self._step_s = self._step_s + passed_s if is_same_step else 0.0
        if is_same_step and self._step_s > pulse.step_limit_s > 0.0:
            return f"has not ended a step within {pulse.step_limit_s:.0f} s"
        return None
