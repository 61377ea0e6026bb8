"""The memory of a request is freed at its end, without Python's cycle collector.

In a server the collector runs rarely (`inferd.engine.api.process.garbage`). One cycle per request would add up to
megabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import AsyncGeneratorType, CoroutineType, TracebackType
from typing import Any

import pytest

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Failure
from inferd.server.text.render_wire import Limits
from inferd.server.text.render_workers import OvertimeError
from inferd.server.text.template import ChatTemplate, Conversation
from tests.reliability.fuzzing import requests
from tests.reliability.test_fuzz import SEED, send_all

from .conftest import Script, ScriptedRouter
from .wire import CLOSE, raw, say

_OURS = ("inferd.", "uvicorn.", "starlette.", "fastapi.", "uvloop.", "pydantic.", "httptools.")
_OF_REQUESTS = (TracebackType, CoroutineType, AsyncGeneratorType, asyncio.Future, BaseExceptionGroup)
"""Types that only requests of the server create here. The tests' own clients are blocking ones."""


@contextlib.contextmanager
def garbage() -> Iterator[Counter[str]]:
    """Counts the server's objects that the block leaves in cycles, by type. The test makes other cycles of its own."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        time.sleep(0.1)  # the last connection is closed a turn of the loop later
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        for item in gc.garbage:
            kind = type(item)
            if kind.__module__.startswith(_OURS) or isinstance(item, _OF_REQUESTS):
                found[f"{kind.__module__}.{kind.__qualname__}"] += 1
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 8}
LONG = {"prompt": "hi " * 200_000, "max_tokens": 8}
STREAM = {**TEXT, "stream": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
MESSAGE = {**CHAT, "model": "tiny"}
INPUT: dict[str, Any] = {"input": "hi", "max_output_tokens": 16}
RANKED: dict[str, Any] = {"query": "a", "documents": ["a", "b", "c"]}
VECTORS: dict[str, Any] = {"model": "tiny", "input": ["a", "b", "c"]}
ALL = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGE,
    "/v1/responses": INPUT,
    "/v1/embeddings": VECTORS,
    "/v1/rerank": RANKED,
}


def _to_the_end(url: str) -> None:
    for body in (TEXT, STREAM, {**TEXT, "n": 3, "prompt": ["a", "b"]}, {**STREAM, "logprobs": 2}):
        assert b"200 OK" in say(url, raw("/v1/completions", body, CLOSE))
    for path, body in ALL.items():
        assert b"200 OK" in say(url, raw(path, body, CLOSE)), path
    for path in ("/health", "/metrics", "/state", "/v1/models"):
        assert b"200 OK" in say(url, raw(path, headers=CLOSE))


def _refused(url: str) -> None:
    wrong = {
        "no such field": {**TEXT, "nothing": 1},
        "too long": LONG,
        "long and wrong": {**LONG, "nothing": 1},
        "no grammar": {**TEXT, "regex": "("},
        "an id too many": {"prompt": [10**6], "max_tokens": 1},
    }
    for why, body in wrong.items():
        assert b" 400 " in say(url, raw("/v1/completions", body, CLOSE)), why
    first = {"role": "assistant", "content": "hi"}
    long = [{"role": "user", "content": "hi " * 20_000}]
    told = {
        "/v1/chat/completions": {**CHAT, "messages": long},
        "/v1/messages": {**MESSAGE, "messages": long},
        "/v1/messages/count_tokens": {"model": "tiny", "messages": [first, {"role": "nobody", "content": "x"}]},
        "/v1/responses": {**INPUT, "input": [first, {"role": "developer", "content": "hi " * 20_000}]},
        "/v1/embeddings": {**VECTORS, "input": "hi " * 20_000},
        "/v1/rerank": {**RANKED, "query": "hi " * 20_000},
    }
    for path, body in told.items():
        assert b" 400 " in say(url, raw(path, body, CLOSE)), path
    assert b" 404 " in say(url, raw("/nowhere", headers=CLOSE))


def _not_http(url: str) -> None:
    for data in (b"GET / HTTP/9.9\r\n\r\n", raw("/health", headers=b"A: " + b"x" * 70_000 + b"\r\n")):
        assert say(url, data).startswith(b"HTTP/1.1 4")
    say(url, raw("/health") * 40 + raw("/health", headers=CLOSE))


def _left(url: str) -> None:
    for path, body in (*ALL.items(), ("/v1/completions", STREAM), ("/v1/completions", LONG)):
        say(url, raw(path, body), 0)
    say(url, raw("/v1/completions", STREAM), 100)
    say(url, raw("/v1/completions", TEXT)[:-3], 0)
    say(url, b"", 0)


def _behind_another(url: str) -> None:
    say(url, raw("/v1/completions", STREAM) + raw("/v1/completions", TEXT) * 3, 100)


def _at_random(url: str) -> None:
    send_all(url, list(requests(SEED + 2, 200)))


@pytest.mark.parametrize("does", [_to_the_end, _refused, _not_http, _left, _behind_another, _at_random])
def test_a_request_leaves_no_cycle(url: str, does: Callable[[str], None]) -> None:
    does(url)  # what is made once and kept
    with garbage() as found:
        does(url)
    assert not found


def _fail(url: str, router: ScriptedRouter) -> None:
    streamed = [(path, {**body, "stream": True}) for path, body in ALL.items() if body not in (VECTORS, RANKED)]
    asked = [*ALL.items(), *streamed, *(("/v1/completions", {**body, "n": 2}) for body in (TEXT, STREAM))]
    for path, body in asked:
        for failing in (
            [Script(failure=Failure("numerical_error", "Not finite."))],
            [Script(text="a"), Script(dies=True)],
            [Script(token_ids=(), dies=True)],
        ):
            router.will(*failing)
            assert b"error" in say(url, raw(path, body, CLOSE)), path
        router.will(Script(ends=False))
        if body.get("model") is None or body is VECTORS:  # a message has no timeout
            assert b"deadline_exceeded" in say(url, raw(path, {**body, "timeout": 0.02}, CLOSE)), path
        router.refusal = RequestError("server_is_overloaded", "There is no room.")
        assert re.match(rb"HTTP/1.1 5", say(url, raw(path, body, CLOSE))), path
        router.reset()


def test_a_failed_answer_leaves_no_cycle(url: str, router: ScriptedRouter) -> None:
    _fail(url, router)
    with garbage() as found:
        _fail(url, router)
    assert not found


def test_a_template_that_refuses_or_takes_too_long_leaves_no_cycle() -> None:
    talk = Conversation([{"role": "user", "content": "a"}])
    refusing, slow = (
        ChatTemplate("{{ raise_exception('no') }}", {}),
        ChatTemplate("{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2, {}),
    )
    with garbage() as found:
        with pytest.raises(RequestError):
            refusing.render(talk)
        with pytest.raises(OvertimeError):
            slow.render(talk, Limits(cpu_s=0.05))
    assert not found
