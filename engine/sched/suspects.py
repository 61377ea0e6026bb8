"""Suspects: requests that may be what ended the engine before this one. One at a time runs alone until it is cleared.

Alone means that no other row is launched and not applied, so that what ends the engine then is known. Suspects and all
others take turns: one suspect, one step of the others. Knows why nobody is a suspect, and no blocks.
"""

from __future__ import annotations

from inferd.engine.request import Request
from inferd.engine.sched.entry import Entry, State
from inferd.engine.sched.fairness.queue import WaitingQueue


class SuspectQueue:
    """Who waits to run alone, and who does."""

    def __init__(self) -> None:
        self._waiting = WaitingQueue()
        self._current: Entry | None = None
        self._is_others_turn = True

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_due(self) -> bool:
        """Whether a suspect is to start before the others get another step."""
        return bool(len(self._waiting)) and self._current is None and not self._is_others_turn

    def add(self, entry: Entry) -> None:
        entry.state = State.SUSPECT
        self._waiting.push(entry)

    def first(self) -> Entry:
        """The suspect of least rank, left where it is."""
        entry = self._waiting.first()
        assert entry is not None, "no suspect waits"
        return entry

    def begin(self) -> None:
        """The first suspect starts; from now on it alone is given rows."""
        self._current = self.first()
        self._waiting.remove(self._current)

    def current(self) -> Entry | None:
        """Who runs alone. Cleared, and so None, once it has computed what it was to, or has ended, and all of it is
        applied: its last row may be what ends the engine."""
        entry = self._current
        if entry is not None and entry.request.in_flight == 0 and not needs_more(entry):
            self._end()
        return self._current

    def others_had_their_turn(self) -> None:
        self._is_others_turn = False

    def forget(self, entry: Entry) -> None:
        """It ended; if it waited, it waits no more."""
        if entry.state is State.SUSPECT:
            self._waiting.remove(entry)

    def check(self) -> None:
        """Raises `AssertionError`."""
        assert all(entry.state is State.SUSPECT for entry in self._waiting.entries())
        assert self._current is None or self._current.state in (State.RUNNING, State.FINISHED)

    def _end(self) -> None:
        self._current, self._is_others_turn = None, True


def needs_more(entry: Entry) -> bool:
    """Whether a suspect has yet to compute what clears it."""
    return entry.state is not State.FINISHED and entry.request.computed < goal_of(entry.request)


def goal_of(request: Request) -> int:
    """Positions by which a suspect is cleared: no more than are ever computed."""
    return min(request.scheduling.alone_until, request.num_needed)
