"""A fair semaphore: tenants take turns, so a tenant with many waiters delays another one by one turn only."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class TenantTurns:
    """At most `num_at_once` turns are held at a time, each from `acquire` to `release`."""

    def __init__(self, num_at_once: int = 1) -> None:
        self.num_at_once = num_at_once
        self._num_held = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiters by tenant; the tenant whose turn is next comes first."""

    def num_ahead(self, tenant: str) -> int:
        """Number of turns that are held, or that begin before the tenant's next request would get one."""
        num_own = len(self._waiting.get(tenant, ()))
        others = (len(turns) for owner, turns in self._waiting.items() if owner != tenant)
        return self._num_held + num_own + sum(min(num, num_own + 1) for num in others)

    async def acquire(self, tenant: str) -> None:
        """Wait for a turn. Requests of one tenant get theirs in order of arrival."""
        if self._num_held < self.num_at_once:
            self._num_held += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Give the turn to the next waiter."""
        assert self._num_held
        while self._waiting:
            tenant, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            if turns:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            if not turn.done():
                turn.set_result(None)
                return
        self._num_held -= 1
