"""Whose turn it is: fair sharing between tenants by virtual counters of service.

VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant's counter grows by the tokens that
it is given, those of prompts once and those of answers twice, over its weight, and the least counter goes first. Who
begins to wait is lifted to the least of those who do, so that nobody saves turns up by being away. Knows requests and
counts; no blocks, no budget and no order within a tenant. With one tenant nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from inferd.engine.sched.entry import Entry, Rank
from inferd.engine.sched.plan import Row

PROMPT_COST, OUTPUT_COST = 1.0, 2.0
"""Of a token, as the paper has them: one of a prompt shares its step with many others, one of an answer does not."""
REMEMBERED_S = 60.0
"""How long a tenant without requests keeps a claim to the last slot."""


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's."""

    weight: float
    served: float
    """The virtual counter: tokens by their cost, over the weight."""
    seen_s: float
    """When a request of it last came."""
    num_live: int = 0
    """Requests that the scheduler owns."""
    num_running: int = 0


class Shares:
    """The tenants that have requests, are ahead of others, or were here lately."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._last: Account | None = None
        """Of who left the queue last: where nobody waits, newcomers are lifted to it."""
        self.now_s = 0.0
        """When a request last came, or a step was planned."""
        self._sweep_s = 0.0
        """When those that are gone are looked for again."""

    @property
    def is_one(self) -> bool:
        """Whether nobody shares with anybody."""
        return len(self._accounts) <= 1

    def arrive(self, tenant: str, weight: float, waiting: Iterable[str], now: float) -> None:
        """A request of `tenant` comes, while those of `waiting` are queued."""
        self.now_s = now
        account = self._accounts.get(tenant)
        if account is not None and len(self._accounts) == 1:
            account.weight, account.seen_s = weight, now
            account.num_live += 1
            return
        names = set(waiting)
        floor = min([self._accounts[name].served for name in names], default=self._last.served if self._last else 0.0)
        if account is None or now >= self._sweep_s:
            self._forget(tenant, floor, now)
        if account is None:
            account = self._accounts[tenant] = Account(weight, floor, now)
        elif tenant not in names:
            account.served = max(account.served, floor)
        account.weight, account.seen_s = weight, now
        account.num_live += 1

    def leave(self, tenant: str) -> None:
        """A request of it is over, or was never taken."""
        account = self._accounts[tenant]
        account.num_live -= 1
        assert account.num_live >= 0, f"{tenant!r} has {account.num_live} requests"

    def stops_waiting(self, tenant: str) -> None:
        """None of it is queued any more."""
        self._last = self._accounts[tenant]

    def runs(self, tenant: str, change: int) -> None:
        """One more of its requests holds a slot, or one fewer."""
        self._accounts[tenant].num_running += change

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
        account = self._accounts[request.tenant]
        account.served += cost / account.weight

    def in_order(self, entries: Iterable[Entry]) -> list[Entry]:
        """Who gives way last stands first."""
        return sorted(entries, key=self._place)

    def _place(self, entry: Entry) -> tuple[float, Rank]:
        return self._accounts[entry.request.tenant].served, entry.rank

    def least(self, tenants: Iterable[str]) -> str:
        """Whose turn it is of these; of equals, of who runs less."""
        accounts = self._accounts
        return min(tenants, key=lambda tenant: (accounts[tenant].served, accounts[tenant].num_running))

    def turn(self, begun: Mapping[str, Entry], waiting: Iterable[str], num_free_slots: int) -> str | None:
        """Whose turn it is to compute prompts: of tenants that have begun one, or have one waiting and may start it;
        None where none is. Of equals who runs less goes first, then who asked last longest ago.

        Who has nothing waiting asks for less than its share: the prompt that it has begun is finished before it counts.
        """
        waits = set(waiting)
        keys = {name: self._turn_key(name) for name in waits if name in begun or self.may_start(name, num_free_slots)}
        for name in begun.keys() - waits:
            keys[name] = self._turn_key(name, PROMPT_COST * begun[name].num_charged)
        return min(keys, key=keys.__getitem__, default=None)

    def _turn_key(self, tenant: str, forgiven: float = 0.0) -> tuple[float, int, float, str]:
        account = self._accounts[tenant]
        return account.served - forgiven / account.weight, account.num_running, account.seen_s, tenant

    def may_start(self, tenant: str, num_free_slots: int) -> bool:
        """Whether a slot may go to it: the last one is left to a tenant that was here lately and has none."""
        if num_free_slots != 1 or self.is_one or not self._accounts[tenant].num_running:
            return num_free_slots > 0
        without = [account for account in self._accounts.values() if not account.num_running]
        return not any(account.num_live or self.now_s - account.seen_s < REMEMBERED_S for account in without)

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

    def check(self, entries: Iterable[Entry], running: Iterable[Entry]) -> None:
        """Raises `AssertionError`."""
        counted = {tenant: (account.num_live, account.num_running) for tenant, account in self._accounts.items()}
        live, seated = [entry.request.tenant for entry in entries], [entry.request.tenant for entry in running]
        expected = {tenant: (live.count(tenant), seated.count(tenant)) for tenant in {*counted, *live}}
        assert counted == expected, f"tenants are counted as {counted}, and are {expected}"

    def _forget(self, tenant: str, floor: float, now: float) -> None:
        """All but `tenant` that would be lifted as newcomers are, and were not here lately."""
        self._sweep_s = now + REMEMBERED_S
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if name == tenant or account.num_live or account.served > floor or now - account.seen_s < REMEMBERED_S
        }
