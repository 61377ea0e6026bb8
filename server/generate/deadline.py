"""Deadlines of answers: work that is not done in time is cancelled, and its request gets an error.

Times are of `time.monotonic`, so that a change of the wall clock ends nothing early.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import NamedTuple, TypeVar

from inferd.engine.api.errors import RequestError

T = TypeVar("T")


class Deadline(NamedTuple):
    """The time at which an answer must be complete."""

    at_s: float
    timeout_s: float
    """The request's timeout, which the error names."""

    @classmethod
    def after(cls, arrival_s: float, timeout_s: float | None) -> Deadline | None:
        """The deadline of a request; None if it has no timeout."""
        return None if timeout_s is None else cls(arrival_s + timeout_s, timeout_s)


async def within(deadline: Deadline | None, work: Awaitable[T]) -> T:
    """The result of `work`. At the deadline, cancels `work` and raises `RequestError`. None waits without end."""
    if deadline is None:
        return await work
    limit = asyncio.timeout(deadline.at_s - time.monotonic())
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        del limit
    # Raised without the TimeoutError and without `limit`, because both refer to the task that this error ends: the
    # error would keep itself alive.
    message = (
        f"The answer was not complete within the request's timeout of {deadline.timeout_s:g} s. Ask for fewer tokens, "
        "or set a longer timeout."
    )
    raise RequestError("deadline_exceeded", message)


def until(deadline: Deadline | None, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yields `events`. Raises `RequestError` at the deadline. Always closes `events`."""
    return events if deadline is None else _until(deadline, events)


async def _until(deadline: Deadline, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    try:
        while True:
            # The limit is never open across a yield, so that it does not cancel work of the reader.
            try:
                event = await within(deadline, anext(events))
            except StopAsyncIteration:
                return
            yield event
    finally:
        await events.aclose()
