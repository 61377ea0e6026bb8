"""Long texts wait behind each other, and work that nobody waits for is dropped."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import weakref
from typing import Any

import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.text.text_threads import LONG_TEXT, TextThreads


class Body:
    """Object that a request was read from."""


def test_work_that_nobody_waits_for_any_more_is_not_begun() -> None:
    """It waited behind other long texts. Running work counts until its thread is done."""

    async def run() -> None:
        threads, began, go_on = TextThreads(max_pending=3), threading.Event(), threading.Event()
        done: list[Any] = []

        def first() -> None:
            began.set()
            go_on.wait(20)
            done.append("first")

        try:
            running = asyncio.ensure_future(threads.run(first, LONG_TEXT))
            body = Body()
            waiting = asyncio.ensure_future(threads.run(functools.partial(done.append, body), LONG_TEXT))
            kept = weakref.ref(body)
            del body
            await asyncio.sleep(0)
            assert began.wait(20) and kept() is not None
            for task in (running, waiting):
                task.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
            await asyncio.sleep(0)
            del task, waiting
            gc.collect()
            assert kept() is None, "what was read for somebody who has left is still in memory"
            last = asyncio.ensure_future(threads.run(lambda: done.append("third"), LONG_TEXT))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="3 prompts are waiting"):  # no thread has reached the second one yet
                await threads.run(lambda: None, 1)
            go_on.set()
            await last
            assert done == ["first", "third"]
        finally:
            go_on.set()
            threads.close()

    asyncio.run(asyncio.wait_for(run(), 20))
