"""A request's place in the scheduler: where it stands, its rank, its slot and its block table."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from inferd.engine.cache.table import BlockTable
from inferd.engine.request import Request

Rank = tuple[float, float, int]
"""(ageing arrival, arrival, order of submission): the least goes first. No two are equal."""

NO_SLOT = -1


class State(Enum):
    """Where an entry is; exactly one owner holds it in each state."""

    WAITING = auto()
    """In the queue: no slot, no blocks, nothing in flight."""
    FOLLOWING = auto()
    """As waiting, but set aside until a running request has computed a prefix that both share."""
    SUSPECT = auto()
    """As waiting, but to run alone first."""
    RUNNING = auto()
    PREEMPTED = auto()
    """Off the running ones; slot and blocks go back, and it waits again, once its launched rows are applied."""
    FINISHED = auto()
    """Over; slot and blocks go back once its launched rows are applied, whose results nobody reads."""


@dataclass(slots=True, eq=False)
class Entry:
    """One accepted request, until its last launched row is applied."""

    request: Request
    table: BlockTable
    rank: Rank
    state: State = State.WAITING
    slot: int = NO_SLOT
    leading: dict[bytes, int] = field(default_factory=dict)
    """Keys of prompt blocks that this running entry is the one to compute -> positions computed when each is done."""
    follows: bytes = b""
    """The key whose block it waits for, while following."""


def rank_of(request: Request, sequence: int, ageing_s: float) -> Rank:
    """A priority level is worth `ageing_s` seconds of waiting.

    A waiting request gains a level every `ageing_s` seconds. All gain alike, so the order of two never changes and no
    queue is ever sorted again; and since later arrivals rank ever later, each request is the first one day.
    """
    return (request.arrival_s + request.priority * ageing_s, request.arrival_s, sequence)
