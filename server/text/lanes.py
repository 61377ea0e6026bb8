"""Threads for work on text that must not hold up the event loop, with long texts kept out of the way of short ones.

A megabyte of prompt takes about a second to tokenize (0.7 s on one core, Zen 4, 2026-11-21); it waits
behind other long texts only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from inferd.engine.api.errors import RequestError

T = TypeVar("T")

LONG_TEXT = 256 * 1024
"""From this many characters, bytes or ids on, work takes the long lane."""


class Lanes:
    """Two pools of threads; `close` ends them."""

    def __init__(self, max_pending: int = 2_048) -> None:
        """`max_pending`: pieces of work that may wait or run; one more is refused."""
        self._max_pending, self._num_pending = max_pending, 0
        self._short = ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 1)), thread_name_prefix="inferd-text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="inferd-long-text")

    async def run(self, work: Callable[[], T], size: int) -> T:
        """`work()` on a thread; `size` picks the lane. Raises what `work` raises, or `RequestError` when full."""
        if self._num_pending >= self._max_pending:
            message = f"{self._num_pending} prompts are waiting to be read, the most that may; retry later."
            raise RequestError("server_is_overloaded", message)
        lane = self._long if size >= LONG_TEXT else self._short
        self._num_pending += 1
        future = asyncio.get_running_loop().run_in_executor(lane, work)
        # Counted down when the thread is done with it, which a caller that was cancelled does not wait for.
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    def _done(self, future: asyncio.Future[T]) -> None:
        self._num_pending -= 1
        if not future.cancelled():
            future.exception()

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
