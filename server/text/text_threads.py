"""Threads for work on text, so that it does not block the event loop and long texts do not delay short ones.

A megabyte of prompt takes about a second to tokenize (0.7 s on one core, Zen 4, 2026-11-21). It waits only behind other
long texts.
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
"""Work on this many characters, bytes or ids, or more, goes to the pool for long texts."""


class TextThreads:
    """Two thread pools, one for short texts and one for long ones; `close` ends them."""

    def __init__(
        self, max_pending: int = 2_048, num_short: int | None = None, num_long: int = 1, name: str = "text"
    ) -> None:
        """`max_pending`: most pieces of work that may wait or run; further ones are refused. `num_short`, `num_long`:
        threads of each pool; None: one for each core, from two to eight. `name`: a part of the threads' names."""
        self._max_pending, self._num_pending = max_pending, 0
        num_short = num_short or max(2, min(8, os.cpu_count() or 1))
        self._short = ThreadPoolExecutor(num_short, thread_name_prefix=f"inferd-{name}")
        self._long = ThreadPoolExecutor(num_long, thread_name_prefix=f"inferd-long-{name}")

    async def run(self, work: Callable[[], T], size: int, *, is_begun: bool = False) -> T:
        """Run `work()` on a thread of the pool for its `size`. Raises what `work` raises, or `RequestError` when too
        much waits, unless `is_begun`: the engine has computed the answer, or the client already reads it.

        If the caller is cancelled before the work begins, the work is dropped at once and never runs. It counts as
        pending until a thread reaches it.
        """
        if self._num_pending >= self._max_pending and not is_begun:
            message = f"{self._num_pending} prompts are waiting to be read, the most that may; retry later."
            raise RequestError("server_is_overloaded", message)
        pool = self._long if size >= LONG_TEXT else self._short
        loop = asyncio.get_running_loop()
        self._num_pending += 1
        # The queue of a pool keeps cancelled work, and all that it refers to, until a thread is free.
        slot = [work]

        def begin() -> T | None:
            try:
                given = slot.pop()
            except IndexError:
                return None
            return given()

        job = pool.submit(begin)

        def done(_: Future[T | None]) -> None:
            """Called when the thread is done, even if the caller was cancelled."""
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the count is not needed any more
                loop.call_soon_threadsafe(self._count_down)

        job.add_done_callback(done)
        wrapped = asyncio.wrap_future(job)
        # Retrieve the error of work whose caller was cancelled: otherwise asyncio logs that it was never retrieved.
        wrapped.add_done_callback(lambda end: end.cancelled() or end.exception())
        try:
            # Shielded: a cancelled job would count as done while it is still in the queue.
            return cast("T", await asyncio.shield(wrapped))
        except asyncio.CancelledError:
            slot.clear()
            raise
        finally:
            # An error of the work refers to this frame. Through the job it would keep itself and the work alive.
            del job, wrapped

    def _count_down(self) -> None:
        self._num_pending -= 1

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
