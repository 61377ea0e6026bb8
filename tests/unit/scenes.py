"""Runs tests of asyncio tasks on a loop of their own. A test waits for turns of the loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


def play(scene: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine to its end. The bound keeps a broken test from hanging."""

    async def whole() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(whole())


async def settled(fact: Callable[[], bool]) -> None:
    """Give turns to all tasks until `fact` holds."""
    for _ in iter(fact, True):
        await asyncio.sleep(0)
