"""Whose turn it is: fair sharing between tenants by virtual counters of service.

VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant's counter grows by the tokens that
it is given, those of prompts once and those of answers twice, over its weight, and the least counter goes first. Who
begins to wait is lifted to the least of those who do, so that nobody saves turns up by being away. Knows requests and
counts; no blocks, no budget and no order within a tenant. With one tenant nothing is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inferd.engine.sched.entry import Entry, Rank
from inferd.engine.sched.fairness.heap import Key, LazyHeap
from inferd.engine.sched.plan import Row

PROMPT_COST, OUTPUT_COST = 1.0, 2.0
"""Of a token, as the paper has them: one of a prompt shares its step with many others, one of an answer does not."""
REMEMBERED_S = 60.0
"""How long a tenant without requests keeps a claim to the last slot."""


@dataclass(slots=True, eq=False)
class TenantShare:
    """One tenant's."""

    tenant: str
    weight: float
    served: float
    """The virtual counter: tokens by their cost, over the weight."""
    seen_s: float
    """When a request of it last came."""
    num_live: int = 0
    """Requests that the scheduler owns."""
    num_running: int = 0
    waits: bool = False
    """Whether some of them are queued."""

    @property
    def is_seated(self) -> bool:
        return self.num_running > 0

    @property
    def is_without(self) -> bool:
        """Whether it has requests, and none of them a slot."""
        return self.num_live > 0 and not self.num_running


def _order(account: TenantShare) -> Key:
    """Of tenants that wait: neither grows less."""
    return account.served, account.seen_s


class Shares:
    """The tenants that have requests, are ahead of others, or were here lately. Whose turn it is takes O(log n)."""

    def __init__(self) -> None:
        self._accounts: dict[str, TenantShare] = {}
        """By when a request of each last came."""
        self._lines: dict[bool, LazyHeap[TenantShare]] = {False: LazyHeap(_order), True: LazyHeap(_order)}
        """Those who wait, by whether they have a slot."""
        self._num_without = 0
        """Who has requests, and none of them a slot."""
        self._last: TenantShare | None = None
        """Of who left the queue last: where nobody waits, newcomers are lifted to it."""
        self.now_s = 0.0
        """When a request last came, or a step was planned."""
        self._sweep_s = 0.0
        """When those that are gone are looked for again."""

    @property
    def is_one(self) -> bool:
        """Whether nobody shares with anybody."""
        return len(self._accounts) <= 1

    def arrive(self, tenant: str, weight: float, now: float) -> None:
        """A request of `tenant` comes."""
        self.now_s = now
        account = self._accounts.pop(tenant, None)
        floor = self._floor()
        if account is None:
            account = TenantShare(tenant, weight, floor, now)
        elif self._accounts and not account.waits:
            account.served = max(account.served, floor)
        account.weight, account.seen_s = weight, max(account.seen_s, now)
        self._change(account, live=1)
        self._accounts[tenant] = account
        if now >= self._sweep_s:
            self._forget(floor, now)

    def leave(self, tenant: str) -> None:
        """A request of it is over, or was never taken."""
        account = self._accounts[tenant]
        self._change(account, live=-1)
        assert account.num_live >= 0, f"{tenant!r} has {account.num_live} requests"

    def starts_waiting(self, tenant: str) -> None:
        """One of it is queued now."""
        account = self._accounts[tenant]
        account.waits = True
        self._lines[account.is_seated].push(account)

    def stops_waiting(self, tenant: str) -> None:
        """None of it is queued any more."""
        account = self._last = self._accounts[tenant]
        account.waits = False
        self._lines[account.is_seated].remove(account)

    def runs(self, tenant: str, change: int) -> None:
        """One more of its requests holds a slot, or one fewer."""
        self._change(self._accounts[tenant], running=change)

    def _change(self, account: TenantShare, *, live: int = 0, running: int = 0) -> None:
        was_seated, was_without = account.is_seated, account.is_without
        account.num_live += live
        account.num_running += running
        self._num_without += account.is_without - was_without
        if account.waits and account.is_seated != was_seated:
            self._lines[was_seated].remove(account)
            self._lines[account.is_seated].push(account)

    def _floor(self) -> float:
        """What who begins to wait is lifted to."""
        firsts = [first.served for line in self._lines.values() if (first := line.first()) is not None]
        return min(firsts, default=self._last.served if self._last is not None else 0.0)

    def charge(self, entry: Entry, row: Row) -> None:
        """A row was launched. What is computed again was paid for, and a prefix hit is no work: both cost nothing."""
        request = entry.request
        end = row.start + row.num_tokens
        num_prompt = min(end, request.num_prompt) - max(row.start, entry.num_charged)
        cost = PROMPT_COST * num_prompt if num_prompt > 0 else 0.0
        if row.samples:
            end += 1
            cost += OUTPUT_COST if end > entry.num_charged else 0.0
        if end > entry.num_charged:
            entry.num_charged = end
        account = self._accounts[request.scheduling.tenant]
        account.served += cost / account.weight

    def in_order(self, entries: Iterable[Entry]) -> list[Entry]:
        """Who gives way last stands first."""
        return sorted(entries, key=self._place)

    def _place(self, entry: Entry) -> tuple[float, Rank]:
        return self._accounts[entry.request.scheduling.tenant].served, entry.rank

    def least(self) -> str | None:
        """Whose turn it is of those who wait; None where nobody does."""
        return self.turn({}, 2)

    def turn(self, begun: Mapping[str, Sequence[Entry]], num_free_slots: int) -> str | None:
        """Whose turn it is to compute prompts: of tenants that have `begun` some, or have one waiting and may start it;
        None where none is. Of equals who runs nothing goes first, then who asked last longest ago.

        Who has nothing waiting asks for less than its share: the prompt that it has begun is finished before it counts.
        """
        may_start = num_free_slots > 0, num_free_slots > (num_free_slots == 1 and self._is_last_slot_kept)
        firsts = [self._lines[is_seated].first() for is_seated in (False, True) if may_start[is_seated]]
        keys = {account.tenant: _turn(account) for account in firsts if account is not None}
        for tenant, entries in begun.items():
            account = self._accounts[tenant]
            keys[tenant] = _turn(account, 0.0 if account.waits else PROMPT_COST * entries[0].num_charged)
        return min(keys, key=keys.__getitem__, default=None)

    def may_start(self, tenant: str, num_free_slots: int) -> bool:
        """Whether a slot may go to it: the last one is left to a tenant that was here lately and has none."""
        is_seated = self._accounts[tenant].is_seated
        return num_free_slots > (num_free_slots == 1 and is_seated and self._is_last_slot_kept)

    @property
    def _is_last_slot_kept(self) -> bool:
        """From those who have one."""
        if self._num_without:
            return True
        for account in reversed(self._accounts.values()):
            if self.now_s - account.seen_s >= REMEMBERED_S:
                return False
            if not account.is_seated:
                return True
        return False

    def victim(self, running: Iterable[Entry], requester: Entry) -> Entry | None:
        """Who gives its blocks back: the last in rank of the tenant that was given most; None where `requester` is it.

        Counters move, so that two may take turns as victims. What is computed again is not charged again: the first in
        this order stays so, and is no victim, until it got further than before.
        """
        last = max(running, key=self._place)
        return last if last is not requester else None

    def ahead(self, tenant: str, own: float, others: Mapping[str, float], *, in_tokens: bool = True) -> float:
        """Of what `others` have to be given, as much as comes before the last of `own` of this tenant; in tokens of
        prompts, or in whatever else turns are counted in, from now on."""
        account = self._accounts[tenant]
        total = 0.0
        for name, demand in others.items():
            other = self._accounts[name]
            owed = max(account.served - other.served, 0.0) / PROMPT_COST if in_tokens else 0.0
            total += min(demand, (owed + own / account.weight) * other.weight)
        return total

    def waiting(self) -> set[str]:
        """Who waits: for checks."""
        return {account.tenant for line in self._lines.values() for account in line}

    def check(self, entries: Iterable[Entry], running: Iterable[Entry]) -> None:
        """Raises `AssertionError`."""
        counted = {tenant: (account.num_live, account.num_running) for tenant, account in self._accounts.items()}
        live, seated = (Counter([entry.request.scheduling.tenant for entry in some]) for some in (entries, running))
        expected = {tenant: (live[tenant], seated[tenant]) for tenant in {*counted, *live}}
        assert counted == expected, f"tenants are counted as {counted}, and are {expected}"
        assert self._num_without == sum(account.is_without for account in self._accounts.values())
        for is_seated, line in self._lines.items():
            assert all(account.waits and account.is_seated == is_seated for account in line)
            first = line.first()
            assert first is None or _order(first) == min(map(_order, line)), f"{first} is first, and was given more"

    def _forget(self, floor: float, now: float) -> None:
        """All that would be lifted as newcomers are, and were not here lately."""
        self._sweep_s = now + REMEMBERED_S
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if account.num_live or account.served > floor or now - account.seen_s < REMEMBERED_S
        }


def _turn(account: TenantShare, forgiven: float = 0.0) -> tuple[float, bool, float]:
    return account.served - forgiven / account.weight, account.is_seated, account.seen_s
