"""What a request needed is freed when it is over, not when Python next looks for cycles: bodies, connections.

Python looks seldom in a server (`inferd.engine.api.garbage`), so that a cycle a request would be megabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import AsyncGeneratorType, CoroutineType, TracebackType
from typing import Any
from urllib.parse import urlsplit

import pytest

from inferd.engine.api.errors import RequestError
from inferd.engine.api.messages import Failure
from inferd.server.app import AppOptions
from inferd.server.connection import ConnectionLimits
from inferd.server.text.limited import Limited
from tests.reliability.fuzzing import requests
from tests.reliability.test_fuzz import SEED, send_all

from .conftest import WAIT_S, Script, ScriptedRouter

_OURS = ("inferd.", "uvicorn.", "starlette.", "fastapi.", "uvloop.", "pydantic.", "httptools.")
_OF_REQUESTS = (TracebackType, CoroutineType, AsyncGeneratorType, asyncio.Future, BaseExceptionGroup)
"""What only a request has here; a test's own clients are blocking ones."""
_CLOSE = b"Connection: close\r\n"


def raw(path: str, body: dict[str, Any] | None = None, headers: bytes = b"") -> bytes:
    """A request as it goes over the wire."""
    data = b"" if body is None else json.dumps(body).encode()
    method = b"GET" if body is None else b"POST"
    return b"%b %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n" % (
        method, path.encode(), len(data), headers
    ) + data  # fmt: skip


def say(url: str, data: bytes, num_read: int = sys.maxsize) -> bytes:
    """Send, read so many bytes of what comes, and leave."""
    address, got = urlsplit(url), b""
    with socket.create_connection((address.hostname or "", address.port or 0), WAIT_S) as client:
        client.sendall(data)
        while len(got) < num_read and (piece := client.recv(65536)):
            got += piece
    return got


@contextlib.contextmanager
def garbage() -> Iterator[Counter[str]]:
    """What the block leaves in cycles, by type: of the server's alone, for a test makes cycles of its own."""
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
VECTORS: dict[str, Any] = {"model": "tiny", "input": ["a", "b", "c"]}
ALL = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGE,
    "/v1/responses": INPUT,
    "/v1/embeddings": VECTORS,
}


def _to_the_end(url: str) -> None:
    for body in (TEXT, STREAM, {**TEXT, "n": 3, "prompt": ["a", "b"]}, {**STREAM, "logprobs": 2}):
        assert b"200 OK" in say(url, raw("/v1/completions", body, _CLOSE))
    for path, body in ALL.items():
        assert b"200 OK" in say(url, raw(path, body, _CLOSE)), path
    for path in ("/health", "/metrics", "/state", "/v1/models"):
        assert b"200 OK" in say(url, raw(path, headers=_CLOSE))


def _refused(url: str) -> None:
    wrong = {
        "no such field": {**TEXT, "nothing": 1},
        "too long": LONG,
        "long and wrong": {**LONG, "nothing": 1},
        "no grammar": {**TEXT, "regex": "("},
        "an id too many": {"prompt": [10**6], "max_tokens": 1},
    }
    for why, body in wrong.items():
        assert b" 400 " in say(url, raw("/v1/completions", body, _CLOSE)), why
    first = {"role": "assistant", "content": "hi"}
    long = [{"role": "user", "content": "hi " * 20_000}]
    told = {
        "/v1/chat/completions": {**CHAT, "messages": long},
        "/v1/messages": {**MESSAGE, "messages": long},
        "/v1/messages/count_tokens": {"model": "tiny", "messages": [first, {"role": "nobody", "content": "x"}]},
        "/v1/responses": {**INPUT, "input": [first, {"role": "developer", "content": "hi " * 20_000}]},
        "/v1/embeddings": {**VECTORS, "input": "hi " * 20_000},
    }
    for path, body in told.items():
        assert b" 400 " in say(url, raw(path, body, _CLOSE)), path
    assert b" 404 " in say(url, raw("/nowhere", headers=_CLOSE))


def _not_http(url: str) -> None:
    for data in (b"GET / HTTP/9.9\r\n\r\n", raw("/health", headers=b"A: " + b"x" * 70_000 + b"\r\n")):
        assert say(url, data).startswith(b"HTTP/1.1 4")
    say(url, raw("/health") * 40)


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
    streamed = [(path, {**body, "stream": True}) for path, body in ALL.items() if body is not VECTORS]
    asked = [*ALL.items(), *streamed, *(("/v1/completions", {**body, "n": 2}) for body in (TEXT, STREAM))]
    for number, (path, body) in enumerate(asked):
        for failing in (
            [Script(failure=Failure("numerical_error", "Not finite."))],
            [Script(text="a"), Script(dies=True)],
            [Script(token_ids=(), dies=True)],
        ):
            router.will(*failing)
            assert b"error" in say(url, raw(path, {**body, "seed": number} if "n" in body else body, _CLOSE)), path
        router.will(Script(ends=False))
        if body.get("model") is None or body is VECTORS:  # a message has no timeout
            assert b"deadline_exceeded" in say(url, raw(path, {**body, "timeout": 0.02}, _CLOSE)), path
        router.refusal = RequestError("server_is_overloaded", "There is no room.")
        assert re.match(rb"HTTP/1.1 5", say(url, raw(path, body, _CLOSE))), path
        router.reset()


def test_a_failed_answer_leaves_no_cycle(url: str, router: ScriptedRouter) -> None:
    _fail(url, router)
    with garbage() as found:
        _fail(url, router)
    assert not found


def test_work_that_fails_within_its_time_leaves_no_cycle() -> None:
    with garbage() as found, pytest.raises(ZeroDivisionError):
        Limited(lambda: 1 // 0, WAIT_S)()
    assert not found


@pytest.mark.parametrize("body", [TEXT, STREAM])
@pytest.mark.parametrize("is_late", [False, True])
def test_who_leaves_with_requests_behind_is_noticed(
    url: str, router: ScriptedRouter, body: dict[str, Any], is_late: bool
) -> None:
    router.will(Script(ends=False))
    address, first, others = urlsplit(url), raw("/v1/completions", body), raw("/v1/completions", TEXT) * 3
    with socket.create_connection((address.hostname or "", address.port or 0), WAIT_S) as client:
        client.sendall(first if is_late else first + others)
        router.wait_for(lambda: bool(router.submits))
        if is_late:
            time.sleep(0.1)
            client.sendall(others)
    router.wait_for(lambda: bool(router.aborted))
    assert [submit.request_id for submit in router.submits] == list(router.aborted)


@pytest.mark.parametrize("num", [1, 16, 17])
def test_requests_that_come_one_by_one_behind_another_are_all_answered(
    url: str, router: ScriptedRouter, num: int
) -> None:
    """From the most that may wait on, nothing more is read: nobody is refused who could be kept waiting."""
    router.will(Script(ends=False))
    address = urlsplit(url)
    with socket.create_connection((address.hostname or "", address.port or 0), WAIT_S) as client:
        client.sendall(raw("/v1/completions", {**TEXT, "timeout": 0.5}))
        router.wait_for(lambda: bool(router.submits))
        for number in range(num):
            client.sendall(raw("/health", headers=_CLOSE if number == num - 1 else b""))
            time.sleep(0.002)
        answers = b"".join(iter(lambda: client.recv(65536), b""))
    assert (answers.count(b" 408 "), answers.count(b"200 OK")) == (1, num)


def test_half_a_head_behind_an_answer_is_not_waited_for_without_end(
    serve: Callable[..., str], router: ScriptedRouter
) -> None:
    limits = ConnectionLimits(head_idle_s=0.2, head_s=1.0)
    url = serve(AppOptions(has_access_log=False), limits=limits)
    router.will(Script(ends=False))
    began_s = time.monotonic()
    answers = say(url, raw("/v1/completions", {**TEXT, "timeout": 0.3}) + b"GET /health HTTP/1.1\r\nHost")
    assert answers.count(b"HTTP/1.1 408 ") == 2
    assert time.monotonic() - began_s < 5
