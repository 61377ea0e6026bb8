"""Work and events with a deadline: results in time pass, late ones are an error, and both are closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.generate.request import Deadline, until, within

NO_END_S = 60.0


def after(seconds: float) -> Deadline:
    return Deadline(time.monotonic() + seconds, timeout_s=2.5)


async def three(closed: list[bool], *, stalls: bool = False) -> AsyncGenerator[int, None]:
    try:
        yield 0
        yield 1
        if stalls:
            await asyncio.Event().wait()
        yield 2
    finally:
        closed.append(True)


@pytest.mark.parametrize("has_deadline", [False, True])
def test_what_comes_in_time_passes_whole(has_deadline: bool) -> None:
    async def run() -> None:
        deadline, closed = after(NO_END_S) if has_deadline else None, list[bool]()
        assert await within(deadline, asyncio.sleep(0, "done")) == "done"
        assert [event async for event in until(deadline, three(closed))] == [0, 1, 2]
        assert closed == [True]

    asyncio.run(run())


def test_what_does_not_come_is_an_error_and_its_source_is_closed() -> None:
    async def run() -> None:
        closed, seen = list[bool](), list[int]()

        async def read() -> None:
            async for event in until(after(0.2), three(closed, stalls=True)):
                seen.append(event)

        with pytest.raises(RequestError) as caught:
            await read()
        assert (closed, caught.value.code) == ([True], "deadline_exceeded")
        assert 2 not in seen
        with pytest.raises(RequestError, match=r"the request's timeout of 2\.5 s"):
            await within(after(-1.0), asyncio.Event().wait())

    asyncio.run(run())


def test_a_timeout_of_the_work_itself_is_its_own() -> None:
    """Only a deadline that passes is an error of this request."""

    async def run() -> None:
        async def fail() -> None:
            raise TimeoutError("a socket")

        with pytest.raises(TimeoutError, match="a socket"):
            await within(after(NO_END_S), fail())

    asyncio.run(run())
