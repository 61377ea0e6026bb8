"""A fair semaphore: tenants take turns, so a tenant with many waiters delays another one by one turn only."""

from __future__ import annotations

import asyncio

from inferd.engine.api.round_robin import RoundRobin


class TenantTurns:
    """At most `num_at_once` turns are held at a time, each from `acquire` to `release`."""

    def __init__(self, num_at_once: int = 1) -> None:
        self.num_at_once = num_at_once
        self._num_held = 0
        self._waiting: RoundRobin[asyncio.Future[None]] = RoundRobin()

    def num_ahead(self, tenant: str) -> int:
        """Number of turns that are held, or that begin before the tenant's next request would get one."""
        return self._num_held + self._waiting.num_before(tenant)

    async def acquire(self, tenant: str) -> None:
        """Wait for a turn. Requests of one tenant get theirs in order of arrival."""
        if self._num_held < self.num_at_once:
            self._num_held += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, turn)
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
            turn = self._waiting.take()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_held -= 1
