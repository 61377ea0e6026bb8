"""The order of a GPU's work, by vector clocks. Finds accesses to memory that neither an event nor a stream orders. The
rule is that of torch's own CUDA sanitizer. Knows no torch.

Work on a stream has a number. A clock holds, for each stream, the number of the last work that is known to have ended.
A thread of the host waits for a clock, work that it queues begins with it, and an event copies that of a stream.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

_ROOT = Path(__file__).resolve().parents[3]
_RECORDER = Path(__file__).parent

Clock = dict[int, int]
"""Stream -> number of its last work that has ended."""


class FaultError(RuntimeError):
    """Says what a GPU would refuse, or do in another order."""


def join(clock: Clock, other: Clock) -> None:
    """Add to `clock` what `other` knows."""
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number


def here() -> str:
    """The line of this repository that runs, outside of the recorder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = _file(frame.f_code.co_filename)
        if file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@cache
def _file(name: str) -> str:
    """The path in this repository; empty for files of the recorder, and for others."""
    path = Path(name)
    is_ours = path.is_relative_to(_ROOT) and "site-packages" not in path.parts and path.parent != _RECORDER
    return str(path.relative_to(_ROOT)) if is_ours else ""


@dataclass(frozen=True, slots=True)
class Work:
    """Something that a stream does."""

    stream: int
    number: int
    what: str

    def is_known_to(self, clock: Clock) -> bool:
        return self.number <= clock.get(self.stream, 0)


@dataclass(slots=True)
class Uses:
    """The work that uses one piece of memory: what wrote it last, and on each stream what has read it since."""

    written: Work | None = None
    read: dict[int, Work] = field(default_factory=dict)

    def conflict(self, clock: Clock, *, is_write: bool) -> tuple[str, Work] | None:
        """(what it does, the work) that may not have ended, for an access that begins with `clock`; None if all is
        ordered."""
        if self.written is not None and not self.written.is_known_to(clock):
            return "writes", self.written
        if is_write:
            for work in self.read.values():
                if not work.is_known_to(clock):
                    return "reads", work
        return None

    def note(self, work: Work, *, is_write: bool) -> None:
        if is_write:
            self.written = work
            self.read.clear()
        else:
            self.read[work.stream] = work

    def unended(self, clock: Clock) -> Work | None:
        """Work that may not have ended."""
        found = self.conflict(clock, is_write=True)
        return None if found is None else found[1]


class Streams:
    """All streams of a device. Stream 0 is the default one. Each thread of the host has a clock of its own."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self._clocks: dict[int, Clock] = {0: {}}
        self.names = {0: "the default stream"}

    @property
    def host(self) -> Clock:
        """The clock of this thread: it has waited for this, or another thread has and gave it work."""
        if not hasattr(self._threads, "clock"):
            self._threads.clock = {}
        clock: Clock = self._threads.clock
        return clock

    def add(self, name: str) -> int:
        stream = len(self._clocks)
        self._clocks[stream], self.names[stream] = {}, name
        return stream

    def clock(self, stream: int) -> Clock:
        """The clock with which work begins that this thread queues now."""
        clock = self._clocks[stream]
        join(clock, self.host)
        return clock

    def queue(self, stream: int, what: str) -> Work:
        clock = self.clock(stream)
        work = Work(stream, clock.get(stream, 0) + 1, what)
        clock[stream] = work.number
        return work

    def wait(self, stream: int, clock: Clock) -> None:
        """Work that is queued on `stream` from now on begins once `clock` is reached."""
        join(self._clocks[stream], clock)

    def synchronize(self, clock: Clock | None = None) -> None:
        """This thread waits for `clock`; None: for all streams."""
        host = self.host
        for other in self._clocks.values() if clock is None else [clock]:
            join(host, other)
