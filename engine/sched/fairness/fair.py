"""Fair sharing between tenants by virtual counters of service.

This is VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). A tenant's counter grows by the
tokens that it is given, over its weight. Prompt tokens count once, output tokens twice. The tenant with the least
counter goes first. A tenant that begins to wait is lifted to the least of those that wait, so that nobody saves turns
by being away.

Knows requests and counts; no blocks, no budget and no order within a tenant. With one tenant nothing is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inferd.engine.sched.entry import Entry, OrderKey
from inferd.engine.sched.fairness.heap import Key, LazyHeap
from inferd.engine.sched.plan import Row

PROMPT_COST, OUTPUT_COST = 1.0, 2.0
"""Cost of a token, as in the paper: a prompt token shares its step with many others, an output token does not."""
REMEMBERED_S = 60.0
"""Seconds for which a tenant without requests keeps a claim to the last slot."""


@dataclass(slots=True, eq=False)
class TenantShare:
    """Counter and requests of one tenant."""

    tenant: str
    weight: float
    served: float
    """The virtual counter: cost of the tokens that it was given, over the weight."""
    seen_s: float
    """Time at which its newest request came."""
    num_live: int = 0
    """Its requests that the scheduler owns."""
    num_running: int = 0
    waits: bool = False
    """Whether some of its requests are queued."""

    @property
    def has_slot(self) -> bool:
        return self.num_running > 0

    @property
    def lacks_slot(self) -> bool:
        """Whether it has requests, and none of them has a slot."""
        return self.num_live > 0 and not self.num_running


def _order(share: TenantShare) -> Key:
    """Order of waiting tenants. Both parts only grow."""
    return share.served, share.seen_s


class Shares:
    """The shares of tenants that have requests, are ahead of others, or were here lately.

    To find whose turn it is takes O(log n).
    """

    def __init__(self) -> None:
        self._tenants: dict[str, TenantShare] = {}
        """Ordered by the time at which the newest request of each tenant came."""
        self._waiting: dict[bool, LazyHeap[TenantShare]] = {False: LazyHeap(_order), True: LazyHeap(_order)}
        """The waiting tenants, by whether they have a slot."""
        self._num_lacking_slot = 0
        """Number of tenants that have requests, and none of them has a slot."""
        self._last: TenantShare | None = None
        """The tenant that left the queue last. If no tenant waits, newcomers are lifted to its counter."""
        self.now_s = 0.0
        """Time at which the last request came, or a step was planned."""
        self._sweep_s = 0.0
        """Time at which tenants that are gone are removed next."""

    @property
    def has_one_tenant(self) -> bool:
        """Whether at most one tenant is known, so that nothing is shared."""
        return len(self._tenants) <= 1

    def arrive(self, tenant: str, weight: float, now: float) -> None:
        """Count a new request of `tenant`."""
        self.now_s = now
        share = self._tenants.pop(tenant, None)
        floor = self._floor()
        if share is None:
            share = TenantShare(tenant, weight, floor, now)
        elif self._tenants and not share.waits:
            share.served = max(share.served, floor)
        share.weight, share.seen_s = weight, max(share.seen_s, now)
        self._change(share, live=1)
        self._tenants[tenant] = share
        if now >= self._sweep_s:
            self._forget(floor, now)

    def leave(self, tenant: str) -> None:
        """Count one request fewer: it ended or was refused."""
        share = self._tenants[tenant]
        self._change(share, live=-1)
        assert share.num_live >= 0, f"{tenant!r} has {share.num_live} requests"

    def starts_waiting(self, tenant: str) -> None:
        """Some requests of the tenant are queued from now on."""
        share = self._tenants[tenant]
        share.waits = True
        self._waiting[share.has_slot].push(share)

    def stops_waiting(self, tenant: str) -> None:
        """No request of the tenant is queued any more."""
        share = self._last = self._tenants[tenant]
        share.waits = False
        self._waiting[share.has_slot].remove(share)

    def add_running(self, tenant: str, change: int) -> None:
        """Count `change` more of its requests that hold a slot."""
        self._change(self._tenants[tenant], running=change)

    def _change(self, share: TenantShare, *, live: int = 0, running: int = 0) -> None:
        had_slot, lacked_slot = share.has_slot, share.lacks_slot
        share.num_live += live
        share.num_running += running
        self._num_lacking_slot += share.lacks_slot - lacked_slot
        if share.waits and share.has_slot != had_slot:
            self._waiting[had_slot].remove(share)
            self._waiting[share.has_slot].push(share)

    def _floor(self) -> float:
        """The counter to which a tenant that begins to wait is lifted."""
        firsts = [first.served for queue in self._waiting.values() if (first := queue.first()) is not None]
        return min(firsts, default=self._last.served if self._last is not None else 0.0)

    def charge(self, entry: Entry, row: Row) -> None:
        """Charge a launched row to its tenant. Tokens that are computed again, and prefix hits, cost nothing."""
        request = entry.request
        end = row.start + row.num_tokens - row.num_drafts
        num_prompt = min(end, request.num_prompt) - max(row.start, entry.num_charged)
        cost = PROMPT_COST * num_prompt if num_prompt > 0 else 0.0
        if row.samples:
            end += 1
            cost += OUTPUT_COST if end > entry.num_charged else 0.0
        if end > entry.num_charged:
            entry.num_charged = end
        share = self._tenants[request.scheduling.tenant]
        share.served += cost / share.weight

    def charge_accepted(self, entry: Entry, row: Row) -> None:
        """Charge the tokens that an applied row gave beyond its first: drafts that were accepted."""
        num_tokens = len(entry.request.ids)
        num_more = num_tokens - max(row.start + 2, entry.num_charged)
        if num_more > 0:
            entry.num_charged = num_tokens
            share = self._tenants[entry.request.scheduling.tenant]
            share.served += OUTPUT_COST * num_more / share.weight

    def in_order(self, entries: Iterable[Entry]) -> list[Entry]:
        """The entries in reverse order of preemption: the first is preempted last."""
        return sorted(entries, key=self._served_and_order)

    def _served_and_order(self, entry: Entry) -> tuple[float, OrderKey]:
        return self._tenants[entry.request.scheduling.tenant].served, entry.order_key

    def least(self) -> str | None:
        """The waiting tenant whose turn it is; None if no tenant waits."""
        return self.turn({}, 2)

    def turn(self, begun: Mapping[str, Sequence[Entry]], num_free_slots: int) -> str | None:
        """The tenant whose turn it is to compute prompts; None if there is none.

        Candidates are tenants that have `begun` prompts, or have one waiting that may start. Among equals, a tenant
        that runs nothing goes first, then the one that asked longest ago.

        A tenant with nothing waiting asks for less than its share, so the prompt that it has begun is not counted until
        it is finished.
        """
        may_start = num_free_slots > 0, num_free_slots > (num_free_slots == 1 and self._is_last_slot_kept)
        firsts = [self._waiting[has_slot].first() for has_slot in (False, True) if may_start[has_slot]]
        keys = {share.tenant: _turn(share) for share in firsts if share is not None}
        for tenant, entries in begun.items():
            share = self._tenants[tenant]
            keys[tenant] = _turn(share, 0.0 if share.waits else PROMPT_COST * entries[0].num_charged)
        return min(keys, key=keys.__getitem__, default=None)

    def may_start(self, tenant: str, num_free_slots: int) -> bool:
        """Whether a slot may go to the tenant. The last slot is left to a tenant that was here lately and has none."""
        has_slot = self._tenants[tenant].has_slot
        return num_free_slots > (num_free_slots == 1 and has_slot and self._is_last_slot_kept)

    @property
    def _is_last_slot_kept(self) -> bool:
        """Whether the last slot is kept from tenants that have one."""
        if self._num_lacking_slot:
            return True
        for share in reversed(self._tenants.values()):
            if self.now_s - share.seen_s >= REMEMBERED_S:
                return False
            if not share.has_slot:
                return True
        return False

    def victim(self, running: Iterable[Entry], requester: Entry) -> Entry | None:
        """The entry to preempt: the last in order of the most served tenant. None if that is `requester`.

        Counters move, so two entries may be preempted in turns. But tokens that are computed again are not charged
        again. So the first in this order stays first, and is not preempted, until it gets further than before.
        """
        last = max(running, key=self._served_and_order)
        return last if last is not requester else None

    def ahead(self, tenant: str, own: float, others: Mapping[str, float], *, in_tokens: bool = True) -> float:
        """The part of `others`' demand that is served before the last of `own`, this tenant's demand.

        Demand is in prompt tokens, or, without `in_tokens`, in any other unit of turns, from now on.
        """
        share = self._tenants[tenant]
        total = 0.0
        for name, demand in others.items():
            other = self._tenants[name]
            owed = max(share.served - other.served, 0.0) / PROMPT_COST if in_tokens else 0.0
            total += min(demand, (owed + own / share.weight) * other.weight)
        return total

    def waiting(self) -> set[str]:
        """Tenants that wait; for checks."""
        return {share.tenant for queue in self._waiting.values() for share in queue}

    def check(self, entries: Iterable[Entry], running: Iterable[Entry]) -> None:
        """Raises `AssertionError`."""
        counted = {tenant: (share.num_live, share.num_running) for tenant, share in self._tenants.items()}
        live, with_slot = (Counter([entry.request.scheduling.tenant for entry in some]) for some in (entries, running))
        expected = {tenant: (live[tenant], with_slot[tenant]) for tenant in {*counted, *live}}
        assert counted == expected, f"tenants are counted as {counted}, and are {expected}"
        assert self._num_lacking_slot == sum(share.lacks_slot for share in self._tenants.values())
        for has_slot, queue in self._waiting.items():
            assert all(share.waits and share.has_slot == has_slot for share in queue)
            first = queue.first()
            assert first is None or _order(first) == min(map(_order, queue)), f"{first} is first, and was given more"

    def _forget(self, floor: float, now: float) -> None:
        """Remove tenants that were not here lately and that would be lifted like newcomers."""
        self._sweep_s = now + REMEMBERED_S
        self._tenants = {
            name: share
            for name, share in self._tenants.items()
            if share.num_live or share.served > floor or now - share.seen_s < REMEMBERED_S
        }


def _turn(share: TenantShare, forgiven: float = 0.0) -> tuple[float, bool, float]:
    return share.served - forgiven / share.weight, share.has_slot, share.seen_s
