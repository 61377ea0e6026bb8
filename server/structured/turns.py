"""A lock that tenants take in turn: one with many waiting holds up another for one turn only."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class Turns:
    """Held by one at a time, from `acquire` to `release`."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant, the one whose turn is next first."""

    async def acquire(self, tenant: str) -> None:
        """Wait for a turn. Within a tenant who came first goes first."""
        if not self._is_held:
            self._is_held = True
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
        """Hand the turn on."""
        assert self._is_held
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
        self._is_held = False
