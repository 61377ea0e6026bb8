"""The moment by which an answer must be complete: what goes on past it is ended, whoever waits.

Moments are of `time.monotonic`, so that setting the wall clock ends nothing early.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from inferd.engine.api.errors import RequestError

T = TypeVar("T")


async def within(deadline_s: float | None, work: Awaitable[T]) -> T:
    """What `work` gives. Cancels it and raises `RequestError` at the deadline; None: there is none."""
    if deadline_s is None:
        return await work
    limit = asyncio.timeout(deadline_s - time.monotonic())
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        del limit
    # Not from the one that says so, nor beside the limit: both lead to the task that this error ends, and so to itself.
    raise passed()


def until(deadline_s: float | None, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """`events`, and `RequestError` at the deadline in place of the next one. Closes `events`, however it ends."""
    return events if deadline_s is None else _until(deadline_s, events)


async def _until(deadline_s: float, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    try:
        while True:
            # Never open across a yield: what the reader does meanwhile must not be cancelled.
            try:
                event = await within(deadline_s, anext(events))
            except StopAsyncIteration:
                return
            yield event
    finally:
        await events.aclose()


def passed() -> RequestError:
    """Of a deadline that is over."""
    return RequestError("deadline_exceeded", "The answer was not complete within the request's timeout.")
