"""Threads for work on text that must not hold up the event loop, with long texts kept out of the way of short ones.

A megabyte of prompt takes about a second to tokenize (0.7 s on one core, Zen 4, 2026-11-21); it waits
behind other long texts only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, cast

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

    async def run(self, work: Callable[[], T], size: int, *, is_begun: bool = False) -> T:
        """`work()` on a thread; `size` picks the lane. Raises what `work` raises, or `RequestError` when full,
        unless `is_begun`: a client that already reads its answer cannot be refused any more.

        Work that has not begun when its caller is cancelled is never done, and is let go of at once; it counts until a
        thread has come to it.
        """
        if self._num_pending >= self._max_pending and not is_begun:
            message = f"{self._num_pending} prompts are waiting to be read, the most that may; retry later."
            raise RequestError("server_is_overloaded", message)
        lane = self._long if size >= LONG_TEXT else self._short
        loop = asyncio.get_running_loop()
        self._num_pending += 1
        # The queue of a pool keeps what is cancelled, with all that it refers to, until a thread is free.
        slot = [work]

        def begin() -> T | None:
            try:
                given = slot.pop()
            except IndexError:
                return None
            return given()

        job = lane.submit(begin)

        def done(_: Future[T | None]) -> None:
            """When the thread is done with it, which a caller that was cancelled does not wait for."""
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody counts any more
                loop.call_soon_threadsafe(self._count_down)

        job.add_done_callback(done)
        wrapped = asyncio.wrap_future(job)
        # What the work of a caller that has gone raises is nobody's: asyncio would log that it was not asked for.
        wrapped.add_done_callback(lambda end: end.cancelled() or end.exception())
        try:
            # Shielded: to cancel the job would count it as done while it still lies in the queue.
            return cast("T", await asyncio.shield(wrapped))
        except asyncio.CancelledError:
            slot.clear()
            raise
        finally:
            # An error of the work names this frame, and would keep itself, and the work, through the job.
            del job, wrapped

    def _count_down(self) -> None:
        self._num_pending -= 1

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
