"""How a test of tasks is played: on a loop of its own, without waiting for anything but turns of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


def play(scene: Callable[[], Awaitable[None]]) -> None:
    """To its end; the bound keeps a broken test from hanging."""

    async def whole() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(whole())


async def settled(fact: Callable[[], bool]) -> None:
    """Give turns to all tasks until `fact` holds."""
    for _ in iter(fact, True):
        await asyncio.sleep(0)
