"""The sequence of faults that strike engines. A seed alone decides it; times count from the last recovery.

Most faults wait until an engine serves again, because engines that deliver nothing one after another end the server by
its own rule (R4). Some do not wait, and strike while the next engine starts. But no engine is stopped for good while
its interpreter loads its libraries, which may take it 120 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random


class Kind(Enum):
    """Kind of a fault."""

    KILL = "engine killed (SIGKILL)"
    STOP = "engine stopped (SIGSTOP) until it was replaced"
    PAUSE = "engine stopped for a moment"
    BURST = "burst of requests"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the sequence."""

    kind: Kind
    gap_s: float
    """Seconds since an engine served again, or since the last fault if this one does not wait."""
    amount: float = 0.0
    """Seconds of a pause, or number of requests of a burst."""
    waits: bool = True


_DECK = (*[Kind.KILL] * 5, *[Kind.BURST] * 2, Kind.STOP, Kind.PAUSE)
_PATIENT = 0.8
"""Share of faults that wait."""


def faults(seed: int) -> Iterator[Fault]:
    """Endless. Shuffled rounds of all kinds, so that each kind comes soon. No two faults in a row strike at once."""
    random = Random(seed)
    waited = True
    while True:
        for kind in random.sample(_DECK, len(_DECK)):
            waits = kind is Kind.STOP or not waited or random.random() < _PATIENT
            amount = {Kind.PAUSE: random.uniform(0.3, 2.5), Kind.BURST: float(random.randrange(8, 32))}.get(kind, 0.0)
            yield Fault(kind, min(random.expovariate(0.5), 6.0), amount, waits)
            waited = waits
