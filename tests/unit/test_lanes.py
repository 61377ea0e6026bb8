"""Code that runs too long on a thread is ended, and no other code."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.generate.prompts import PromptReader
from inferd.server.text.lanes import LONG_TEXT, Lanes, OvertimeError, TimeLimited
from inferd.server.text.model import ServedModel
from inferd.server.text.template import ChatTemplate, Conversation

TINY = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
ENDLESS = """{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% endfor %}
{% endfor %}{% endfor %}"""


def on_a_thread(work: Any, limit_s: float, then: Any = lambda: None) -> Any:
    """The result of `work` under its limit; afterwards `then` has run on the same thread."""

    async def run() -> Any:
        with ThreadPoolExecutor(1) as pool:
            loop = asyncio.get_running_loop()
            try:
                return await loop.run_in_executor(pool, TimeLimited(work, limit_s))
            finally:
                await loop.run_in_executor(pool, then)

    return asyncio.run(run())


def test_an_endless_template_is_ended_and_its_thread_goes_on() -> None:
    template = ChatTemplate(ENDLESS, {})
    went_on: list[int] = []
    with pytest.raises(OvertimeError, match=r"longer than 0\.05 s"):
        on_a_thread(
            lambda: template.render(Conversation([{"role": "user", "content": "x"}])), 0.05, lambda: went_on.append(1)
        )
    assert went_on == [1]


def test_messages_that_take_too_long_to_render_are_refused_and_others_are_rendered() -> None:
    slow = "{% if messages|length > 1 %}" + ENDLESS + "{% endif %}done"
    model = ServedModel.load(TINY, ("tiny",), max_model_len=64, vocab_size=3_072)
    message = {"role": "user", "content": "x"}

    async def run() -> None:
        lanes = Lanes()
        try:
            prompts = PromptReader(replace(model, template=ChatTemplate(slow, {})), lanes, render_limit_s=0.05)
            for _ in range(10):  # more than there are threads
                with pytest.raises(RequestError) as caught:
                    await prompts.render(Conversation([message, message]), add_special=False)
                assert (caught.value.code, caught.value.param) == ("invalid_value", "messages")
                assert "longer than 0.05 s" in caught.value.message
            assert (await prompts.render(Conversation([message]), add_special=False))[1] == "done"
        finally:
            lanes.close()

    asyncio.run(run())


class Body:
    """Object that a request was read from."""


def test_work_that_nobody_waits_for_any_more_is_not_begun() -> None:
    """It waited behind other long texts. Running work counts until its thread is done."""

    async def run() -> None:
        lanes, began, go_on = Lanes(max_pending=3), threading.Event(), threading.Event()
        done: list[Any] = []

        def first() -> None:
            began.set()
            go_on.wait(20)
            done.append("first")

        try:
            running = asyncio.ensure_future(lanes.run(first, LONG_TEXT))
            body = Body()
            waiting = asyncio.ensure_future(lanes.run(functools.partial(done.append, body), LONG_TEXT))
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
            last = asyncio.ensure_future(lanes.run(lambda: done.append("third"), LONG_TEXT))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="3 prompts are waiting"):  # no thread has reached the second one yet
                await lanes.run(lambda: None, 1)
            go_on.set()
            await last
            assert done == ["first", "third"]
        finally:
            go_on.set()
            lanes.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_what_ends_in_time_is_left_alone() -> None:
    assert on_a_thread(lambda: sum(range(1_000)), 60.0) == 499_500


def test_an_error_of_the_work_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        on_a_thread(lambda: 1 // 0, 60.0)


def test_one_exception_that_is_swallowed_is_followed_by_another() -> None:
    """Simulates an exception that arrives in a destructor."""
    num_caught = 0

    def stubborn() -> None:
        nonlocal num_caught
        while num_caught < 2:
            try:
                while True:
                    pass
            except BaseException:
                num_caught += 1
        while True:
            pass

    with pytest.raises(OvertimeError):
        on_a_thread(stubborn, 0.01)
    assert num_caught == 2


def test_work_that_ends_about_when_its_time_does_gives_a_result_or_the_error() -> None:
    """Ends work many times; the waiting thread goes on."""

    def count(num: int) -> int:
        for _ in range(num):
            pass
        return num

    async def run() -> set[str]:
        ends = set()
        with ThreadPoolExecutor(1) as pool:
            loop = asyncio.get_running_loop()
            names = {await loop.run_in_executor(pool, threading.get_ident)}
            for i in range(100):
                num = 200_000 * (i % 10)  # up to about 40 ms; the lock changes hands every 5
                try:
                    assert await loop.run_in_executor(pool, TimeLimited(functools.partial(count, num), 0.001)) == num
                    ends.add("result")
                except OvertimeError:
                    ends.add("overtime")
                names.add(await loop.run_in_executor(pool, threading.get_ident))
        assert len(names) == 1, "the waiting thread was ended and replaced"
        return ends

    assert asyncio.run(run()) == {"result", "overtime"}
