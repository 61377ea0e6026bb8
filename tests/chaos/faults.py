"""What befalls an engine, in which order: a sequence that a seed alone decides. When is counted from its last recovery.

A fault mostly waits until an engine serves again: engines that deliver nothing, one after another, end the server by
its own rule (R4). Some do not wait, and strike while the next engine starts; but no engine is stopped for good while
its interpreter reads its libraries, which it is given 120 s for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random


class Kind(Enum):
    """What happens."""

    KILL = "engine killed (SIGKILL)"
    STOP = "engine stopped (SIGSTOP) until it was replaced"
    PAUSE = "engine stopped for a moment"
    BURST = "burst of requests"


@dataclass(frozen=True, slots=True)
class Fault:
    """One of a sequence."""

    kind: Kind
    gap_s: float
    """Since an engine served again, or since the last fault where it does not wait."""
    amount: float = 0.0
    """Of a pause, its seconds; of a burst, its requests."""
    waits: bool = True


_DECK = (*[Kind.KILL] * 5, *[Kind.BURST] * 2, Kind.STOP, Kind.PAUSE)
_PATIENT = 0.8
"""The share of faults that wait."""


def faults(seed: int) -> Iterator[Fault]:
    """Without end. Deck after deck, so that each kind comes soon; no two in a row do not wait."""
    random = Random(seed)
    waited = True
    while True:
        for kind in random.sample(_DECK, len(_DECK)):
            waits = kind is Kind.STOP or not waited or random.random() < _PATIENT
            amount = {Kind.PAUSE: random.uniform(0.3, 2.5), Kind.BURST: float(random.randrange(8, 32))}.get(kind, 0.0)
            yield Fault(kind, min(random.expovariate(0.5), 6.0), amount, waits)
            waited = waits
