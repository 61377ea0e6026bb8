"""Suspects: requests that may have crashed the engine before this one. One at a time runs alone until it is cleared.

Alone means that no other row is in flight, so that a crash names its cause. Suspects and all other requests take turns:
one suspect, one step of the others. Does not know why a request is a suspect, and knows no blocks.
"""

from __future__ import annotations

from inferd.engine.request import Request
from inferd.engine.sched.entry import Entry, State
from inferd.engine.sched.fairness.queue import WaitingQueue


class SuspectQueue:
    """The suspects that wait to run alone, and the one that does."""

    def __init__(self) -> None:
        self._waiting = WaitingQueue()
        self._current: Entry | None = None
        self._is_others_turn = True

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_due(self) -> bool:
        """Whether a suspect must start before the other requests get another step."""
        return bool(len(self._waiting)) and self._current is None and not self._is_others_turn

    def add(self, entry: Entry) -> None:
        entry.state = State.SUSPECT
        self._waiting.push(entry)

    def first(self) -> Entry:
        """The first suspect in order; it stays in the queue."""
        entry = self._waiting.first()
        assert entry is not None, "no suspect waits"
        return entry

    def begin(self) -> None:
        """Start the first suspect. From now on only it is given rows."""
        self._current = self.first()
        self._waiting.remove(self._current)

    def current(self) -> Entry | None:
        """The suspect that runs alone, or None.

        It is cleared once it has computed `num_to_clear` positions, or has ended, and all of it is applied: until then
        its last row may still crash the engine.
        """
        entry = self._current
        if entry is not None and entry.request.in_flight == 0 and _is_cleared(entry):
            self._end()
        return self._current

    def others_had_their_turn(self) -> None:
        self._is_others_turn = False

    def forget(self, entry: Entry) -> None:
        """Remove a suspect that ended while it waited."""
        if entry.state is State.SUSPECT:
            self._waiting.remove(entry)

    def check(self) -> None:
        """Raises `AssertionError`."""
        assert all(entry.state is State.SUSPECT for entry in self._waiting.entries())
        assert self._current is None or self._current.state in (State.RUNNING, State.FINISHED)

    def _end(self) -> None:
        self._current, self._is_others_turn = None, True


def _is_cleared(entry: Entry) -> bool:
    return entry.state is State.FINISHED or entry.request.computed >= num_to_clear(entry.request)


def num_to_clear(request: Request) -> int:
    """Positions that a suspect has to compute until it is cleared, at most those that it ever computes."""
    return min(request.scheduling.alone_until, request.num_needed)
