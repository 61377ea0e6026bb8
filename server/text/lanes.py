"""Threads for work on text that must not hold up the event loop, with long texts kept out of the way of short ones.

A megabyte of prompt takes about a second to tokenize (0.7 s a MB on one core of the machine this was written on); it waits
behind other long texts only. Waiting work is bounded by the requests that are open.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LONG_TEXT = 256 * 1024
"""From this many characters, bytes or ids on, work takes the long lane."""


class Lanes:
    """Two pools of threads; `close` ends them."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 1)), thread_name_prefix="inferd-text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="inferd-long-text")

    async def run(self, work: Callable[[], T], size: int) -> T:
        """`work()` on a thread; `size` picks the lane. Raises what `work` raises."""
        lane = self._long if size >= LONG_TEXT else self._short
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
