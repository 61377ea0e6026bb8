"""A request's place in the scheduler: where it stands, its rank, its slot and its block table."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from inferd.engine.api.wire.params import SchedulingParams
from inferd.engine.cache.table import BlockTable
from inferd.engine.request import Request

Rank = tuple[float, float, int]
"""(ageing arrival, arrival, order of submission): the least goes first. No two are equal."""

PrefixKey = tuple[str, int, bytes]
"""(tenant, priority, key of the last full block of the prompt)."""

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
    prefix_key: PrefixKey | None = None
    """Key of the group with which it shares blocks; None if it shares none."""
    num_to_compute: int = 0
    """Tokens, prefix hits and another member's not counted, that it was expected to compute when it began to wait."""
    start_by_s: float = inf
    """When it has to start for its first token to be in time; infinite where it has none to be in time for."""
    first_token_s: float | None = None
    """When the first token of this engine's came, where there is a TPOT target; None before."""
    first_output: int = 0
    """Which token of the output that was, from 1 on: a replay goes on in the middle."""
    num_charged: int = 0
    """Tokens, prompt and output together, that its tenant's share was charged for."""


def rank_of(scheduling: SchedulingParams, sequence: int, ageing_s: float) -> Rank:
    """A priority level is worth `ageing_s` seconds of waiting.

    A waiting request gains a level every `ageing_s` seconds. All gain alike, so the order of two never changes and no
    queue is ever sorted again; and since later arrivals rank ever later, each request is the first one day.

    Within a level goes first whose first token is due first: if any order keeps all targets, that one does, and who
    came later with the same target undoes no promise, however long its prompt. A target of a level's seconds is as good
    as none, so that priorities stay first.
    """
    urgency_s = 0.0
    if scheduling.ttft_target_s is not None:
        urgency_s = ageing_s - min(scheduling.ttft_target_s, ageing_s)
    arrival_s = scheduling.arrival_s
    return (arrival_s + scheduling.priority * ageing_s - urgency_s, arrival_s, sequence)
