"""The scheduler's record of one request: its state, its place in the order, its slot and its block table.
Also the set of all records that run.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from inferd.engine.api.wire.params import SchedulingParams
from inferd.engine.cache.table import BlockTable
from inferd.engine.request import Request
from inferd.engine.sched.draft_odds import PlaceCounts

OrderKey = tuple[float, float, int]
"""(arrival shifted by priority and target, arrival, order of submission). The least goes first. No two are equal."""

PrefixKey = tuple[str, int, bytes]
"""(tenant, priority, key of the last full block of the prompt)."""

NO_SLOT = -1

LONGEST_HOLD_S = 0.2
"""Seconds for which a request that goes on after an engine's death may wait for those that do not go on yet."""


class State(Enum):
    """State of an entry. In each state exactly one object holds the entry."""

    WAITING = auto()
    """In the queue, with no slot, no blocks and nothing in flight."""
    AWAITING_PREFIX = auto()
    """As WAITING, but set aside until a running request has computed a prefix that both share."""
    SUSPECT = auto()
    """As WAITING, but it must run alone first."""
    RUNNING = auto()
    PREEMPTED = auto()
    """No longer running. Once its launched rows are applied, it gives back slot and blocks and waits again."""
    FINISHED = auto()
    """Ended. Once its launched rows are applied, it gives back slot and blocks; their results are discarded."""


@dataclass(slots=True, eq=False)
class Entry:
    """One accepted request. It is kept until the request's last launched row is applied."""

    request: Request
    table: BlockTable
    order_key: OrderKey
    state: State = State.WAITING
    slot: int = NO_SLOT
    leading: dict[bytes, int] = field(default_factory=dict)
    """Prompt blocks that this running entry computes for its waiters: block key -> positions computed once it is
    done."""
    awaited_key: bytes = b""
    """Key of the block that it waits for in AWAITING_PREFIX."""
    prefix_key: PrefixKey | None = None
    """Key of the group with which it shares blocks; None if it shares none."""
    num_to_compute: int = 0
    """Tokens that it was expected to compute when it began to wait, less prefix hits and blocks that another member
    computes."""
    start_by_s: float = inf
    """Latest start for its first token to be in time; infinite if it has no target or has started."""
    first_token_s: float | None = None
    """Time of the first token that this engine drew; None before."""
    first_output: int = 0
    """Index of that token in the output, from 1 on; above 1 if the request was replayed."""
    draft_start: int = 0
    """First position whose KV the draft model lacks since this entry has its slot."""
    draft_counts: PlaceCounts | None = None
    """How often drafts of the draft model were right for this request; None until it may have some."""
    num_charged: int = 0
    """Tokens, prompt and output together, that its tenant was charged for."""

    def may_be_held(self, until_s: float) -> bool:
        """Whether it may wait until then: it was replayed, has had its first token for less than `LONGEST_HOLD_S`, and
        has no TPOT target."""
        if self.first_output <= 1 or self.first_token_s is None:
            return False
        return self.request.scheduling.tpot_target_s is None and until_s - self.first_token_s < LONGEST_HOLD_S


def order_key_of(scheduling: SchedulingParams, sequence: int, ageing_s: float) -> OrderKey:
    """OrderKey of a request. A priority level is worth `ageing_s` seconds of waiting.

    All requests age alike, so the order of two never changes and the queue is never sorted again. Later arrivals rank
    ever later, so no request starves.

    Within a level, the request whose first token is due first goes first. If any order meets all targets, this one
    does. A later request with the same target cannot delay an earlier one, however long its prompt. A target of
    `ageing_s` or more counts as none, so that priorities stay first.
    """
    urgency_s = 0.0
    if scheduling.ttft_target_s is not None:
        urgency_s = ageing_s - min(scheduling.ttft_target_s, ageing_s)
    arrival_s = scheduling.arrival_s
    return (arrival_s + scheduling.priority * ageing_s - urgency_s, arrival_s, sequence)


class RunningSet:
    """The running entries, in their order. A step moves only a few of them, so this is a list.

    The victim of a preemption is always the last in order, and never ranks before the requester. So the first in order
    is never preempted: it runs until it ends, and two requests cannot preempt each other for ever.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def add(self, entry: Entry) -> None:
        insort(self._entries, entry, key=_order_key)

    def remove(self, entry: Entry) -> None:
        index = bisect_left(self._entries, entry.order_key, key=_order_key)
        assert self._entries[index] is entry, "removed and not running"
        del self._entries[index]

    def victim(self, requester: Entry) -> Entry | None:
        """The entry to preempt so that `requester` can go on, or None if no entry ranks behind it."""
        last = self._entries[-1]
        return last if last is not requester else None


def _order_key(entry: Entry) -> OrderKey:
    return entry.order_key
