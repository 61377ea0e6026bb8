"""Tells a hung engine from a busy one, and a lost frame from one that is under way.

An engine lives while the kernel has it and no signal has stopped it. It gets on if its loop turns and its steps end,
and has bounds of time for both. Only the time counts that it could use: not that in which it waited for a processor,
and not that in which this process stood still. So an engine on a busy machine may take as long as it needs. One that
waits for a lock, or runs in an endless loop, may not, whatever holds its interpreter.
"""

from __future__ import annotations

from typing import Protocol

from inferd.engine.api.process.heartbeat import EnginePhase, Pulse
from inferd.engine.api.process.processor_time import ProcessorUse
from inferd.engine.api.wire.client import FrameCounts

TICK_S = 0.25
"""How often to look."""
MAX_STOPPED_S = 5.0
MAX_TURN_S = 10.0
"""Longest time between two turns of the loop of an engine that serves and computes no step. It turns once a second if
idle. Reading a vocabulary of 262,000 tokens keeps it from turning for 0.5 s, twice (2 cores, AMD EPYC Zen 4,
2026-11-28)."""
MAX_LATE_S = 3.0
"""Seconds that a frame may be late while both sides run and no other frame comes. A frame takes less than a
millisecond."""
_FIRST_BEAT_S = 120.0
"""Enough for an interpreter to start and load its libraries, even from a cold disk."""
_MAX_ASLEEP_S = 600.0
"""Seconds for which an engine may sleep while it loads. It may wait for a slow file system, or for another rank."""
_DOUBT_S = 1.5
"""Seconds without progress from which on the kernel is asked how much of the time the engine could use. Until then all
of it counts."""
_MAX_TICK_S = 4 * TICK_S
_LOOK_S = 1.0
"""Seconds between two questions to the kernel, which take 0.06 ms for each thread of the engine (AMD EPYC Zen 4,
2026-11-28). The time between them is judged at the next one."""


class Processes(Protocol):
    """A process as the kernel sees it (`ProcessorTime`)."""

    def is_stopped(self) -> bool: ...

    def use(self) -> ProcessorUse: ...

    def forget(self) -> None: ...


class Watchdog:
    """Watches one engine."""

    def __init__(self, now: float, engine: Processes, own: Processes, *, may_wait: bool = False) -> None:
        """`engine`, `own`: the kernel's view of the engine's process and of this one. `may_wait`: whether the engine is
        a standby that has not been promoted."""
        self._now, self._engine, self._own, self._may_wait = now, engine, own, may_wait
        self._progress = 0, 0
        """The engine's beats and steps at the last look."""
        self._stopped_s = self._asleep_s = self._turn_s = self._step_s = 0.0
        self._still_s = 0.0
        """Seconds without progress, whatever the reason."""
        self._unjudged_s = self._unjudged_run_s = 0.0
        """Seconds since the kernel was asked, and seconds of them in which frames may have come."""
        self._to_server, self._to_engine = _Direction(), _Direction()
        self.is_step_endless = False
        """Whether `look` gave the engine up because a step ran too long."""

    def look(self, pulse: Pulse | None, now: float, frame_counts: FrameCounts) -> str | None:
        """Why the engine must be replaced, or None. Call it every tick.

        `frame_counts`: counters of the server's end of the wire.
        """
        passed_s, self._now = min(now - self._now, _MAX_TICK_S), now
        if self._engine.is_stopped():
            self._forget()
            # It may have gone on between two looks, and been stopped again.
            progress = self._progress if pulse is None else (pulse.num_beats, pulse.num_steps)
            if progress != self._progress:
                self._progress = progress
                self._stopped_s = self._step_s = self._turn_s = self._still_s = 0.0
            self._stopped_s += passed_s
            return f"was stopped for {MAX_STOPPED_S:g} s" if self._stopped_s > MAX_STOPPED_S else None
        self._stopped_s = 0.0
        if pulse is None:
            self._turn_s += self._judged(passed_s)[0]
            return f"gave no sign of life for {_FIRST_BEAT_S:g} s" if self._turn_s > _FIRST_BEAT_S else None
        num_beats, num_steps = self._progress
        has_turned = pulse.num_beats != num_beats
        is_same_step = pulse.step_started_s > 0.0 and pulse.num_steps == num_steps
        self._still_s = 0.0 if has_turned or pulse.num_steps != num_steps else self._still_s + passed_s
        self._progress = pulse.num_beats, pulse.num_steps
        if pulse.phase is EnginePhase.STANDBY and self._may_wait:
            return None
        usable_s, both_s = self._usable(passed_s, pulse)
        hang = self._hang(pulse, usable_s, has_turned=has_turned, is_same_step=is_same_step)
        return hang or self._lost(pulse, frame_counts, both_s, is_same_step)

    def _hang(self, pulse: Pulse, usable_s: float, *, has_turned: bool, is_same_step: bool) -> str | None:
        """The hang in words, or None. `usable_s`: seconds since the last look that it could use."""
        turns = pulse.phase is not EnginePhase.LOADING
        self._turn_s = self._turn_s + usable_s if turns and not has_turned and not is_same_step else 0.0
        self._step_s = self._step_s + usable_s if is_same_step else 0.0
        if self._asleep_s > _MAX_ASLEEP_S:
            return f"has slept for {_MAX_ASLEEP_S:g} s while it loaded"
        if self._turn_s > MAX_TURN_S:
            return f"has not gone on for {MAX_TURN_S:g} s between two steps"
        self.is_step_endless = is_same_step and self._step_s > pulse.step_limit_s > 0.0
        return f"has not ended a step within {pulse.step_limit_s:.0f} s" if self.is_step_endless else None

    def _usable(self, passed_s: float, pulse: Pulse) -> tuple[float, float]:
        """(seconds that the engine could use, seconds that both processes could use)."""
        is_late = self._to_server.is_late or self._to_engine.is_late
        is_loading = pulse.phase is EnginePhase.LOADING
        if is_loading or is_late or self._still_s > _DOUBT_S:
            return self._judged(passed_s, is_loading=is_loading)
        self._forget()
        return passed_s, min(passed_s, TICK_S)

    def _forget(self) -> None:
        self._engine.forget()
        self._own.forget()
        self._unjudged_s = self._unjudged_run_s = self._asleep_s = 0.0

    def _judged(self, passed_s: float, *, is_loading: bool = False) -> tuple[float, float]:
        """The same, as the kernel says; nothing until it is asked again."""
        self._unjudged_s += passed_s
        # After a suspension of this process, it needs a moment to read what came.
        self._unjudged_run_s += min(passed_s, TICK_S)
        if self._unjudged_s < _LOOK_S:
            return 0.0, 0.0
        seconds, run_s, self._unjudged_s, self._unjudged_run_s = self._unjudged_s, self._unjudged_run_s, 0.0, 0.0
        use = self._engine.use()
        self._asleep_s = self._asleep_s + seconds if is_loading and use.is_asleep else 0.0
        return seconds * use.share, run_s * use.share * self._own.use().share

    def _lost(self, pulse: Pulse, frame_counts: FrameCounts, run_s: float, is_same_step: bool) -> str | None:
        """The frame that was lost, in words, or None. `run_s`: seconds since the last look that both sides could
        use."""
        awaited_s = run_s if frame_counts.is_awaited else 0.0
        if self._to_server.is_lost(pulse.num_frames_sent, frame_counts.num_received, awaited_s):
            return f"has sent frame {frame_counts.num_received}, which never came"
        # A serving engine reads between two steps, when its loop turns.
        is_reading = pulse.phase is EnginePhase.SERVING and not is_same_step and self._still_s <= _DOUBT_S
        awaited_s = run_s if is_reading else 0.0
        if self._to_engine.is_lost(frame_counts.num_sent, pulse.num_frames_received, awaited_s):
            return f"was sent frame {pulse.num_frames_received}, which it has never seen"
        return None


class _Direction:
    """One direction of the wire."""

    def __init__(self) -> None:
        self._num_received = 0
        self._late_s = 0.0

    @property
    def is_late(self) -> bool:
        return self._late_s > 0.0

    def is_lost(self, num_sent: int, num_received: int, awaited_s: float) -> bool:
        """Whether a frame was sent and does not come. `awaited_s`: seconds more in which it should have come."""
        if num_received >= num_sent or num_received != self._num_received:
            self._num_received, self._late_s = num_received, 0.0
        else:
            self._late_s += awaited_s
        return self._late_s > MAX_LATE_S
