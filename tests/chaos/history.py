"""Data: all that one request saw, from its first attempt to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tests.chaos.asks import Marked
from tests.reliability.asking import Json


class End(Enum):
    """How the last attempt ended."""

    WHOLE = "whole"
    """The server ended its answer, and the client read all of it."""
    LEFT = "left"
    """The client closed the connection, as planned."""
    REFUSED = "refused"
    """A status other than 200."""
    BROKEN = "broken"
    """The connection ended before the answer did, or there was none."""
    SILENT = "silent"
    """Nothing came for longer than an answer may take."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream."""

    at_s: float
    name: str
    """Name in its `event:` line; empty: it has none."""
    data: str


@dataclass(slots=True)
class Attempt:
    """One POST and its answer."""

    sent_s: float
    end: End = End.BROKEN
    ended_s: float = 0.0
    status: int = 0
    """0: no answer began."""
    retry_after_s: float | None = None
    request_id: str = ""
    """The id in the answer's header."""
    events: list[Event] = field(default_factory=list)
    body: Json | None = None
    """Body of an answer that is no stream."""
    detail: str = ""


@dataclass(slots=True)
class History:
    """One request: every attempt, of which only the last may have been served."""

    asked: Marked
    manner: str
    attempts: list[Attempt] = field(default_factory=list)
    may_be_refused: bool = False
    """Whether the client sent it after it had told the server to end."""

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]
