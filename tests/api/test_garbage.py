"""What a request needed is freed when it is over, not when Python next looks for cycles: bodies, connections.

Python looks seldom in a server (`inferd.engine.api.garbage`), so that a cycle a request would be megabytes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import pytest

from inferd.engine.api.errors import RequestError
from inferd.engine.api.messages import Failure
from tests.reliability.fuzzing import requests
from tests.reliability.test_fuzz import SEED, send_all

from .conftest import WAIT_S, Script, ScriptedRouter

_OURS = ("inferd.", "uvicorn.", "starlette.", "fastapi.", "uvloop.", "pydantic.")
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
            if kind.__module__.startswith(_OURS) or isinstance(item, TracebackType):
                found[f"{kind.__module__}.{kind.__qualname__}"] += 1
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 8}
LONG = {"prompt": "hi " * 200_000, "max_tokens": 8}
STREAM = {**TEXT, "stream": True}


def _to_the_end(url: str) -> None:
    for body in (TEXT, STREAM, {**TEXT, "n": 3, "prompt": ["a", "b"]}, {**STREAM, "logprobs": 2}):
        assert b"200 OK" in say(url, raw("/v1/completions", body, _CLOSE))
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
    assert b" 404 " in say(url, raw("/nowhere", headers=_CLOSE))


def _not_http(url: str) -> None:
    for data in (b"GET / HTTP/9.9\r\n\r\n", raw("/health", headers=b"A: " + b"x" * 70_000 + b"\r\n")):
        assert say(url, data).startswith(b"HTTP/1.1 4")
    say(url, raw("/health") * 40)


def _left(url: str) -> None:
    for body in (TEXT, STREAM, LONG):
        say(url, raw("/v1/completions", body), 0)
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
    asked = [{**body, "n": n} for body in (TEXT, STREAM) for n in (1, 2)]
    router.will(Script(failure=Failure("numerical_error", "Not finite.")))
    for body in asked:
        assert b"numerical_error" in say(url, raw("/v1/completions", body, _CLOSE))
    router.will(Script(ends=False))
    for body in asked:
        assert b"deadline_exceeded" in say(url, raw("/v1/completions", {**body, "timeout": 0.02}, _CLOSE))
    router.will(Script(dies=True))
    for body in asked:
        assert b"error" in say(url, raw("/v1/completions", body, _CLOSE))
    router.refusal = RequestError("server_is_overloaded", "There is no room.")
    for body in asked:
        assert b" 503 " in say(url, raw("/v1/completions", body, _CLOSE))
    router.reset()


def test_a_failed_answer_leaves_no_cycle(url: str, router: ScriptedRouter) -> None:
    _fail(url, router)
    with garbage() as found:
        _fail(url, router)
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
