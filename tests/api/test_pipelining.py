"""Requests that are sent while an earlier one is still being answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from inferd.server.transport.limits import ConnectionLimits
from tests.api.conftest import app_settings

from .conftest import Script, ScriptedRouter
from .wire import CLOSE, connect, raw, say

TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 8}
STREAM = {**TEXT, "stream": True}


@pytest.mark.parametrize("body", [TEXT, STREAM])
@pytest.mark.parametrize("is_late", [False, True])
def test_who_leaves_with_requests_behind_is_noticed(
    url: str, router: ScriptedRouter, body: dict[str, Any], is_late: bool
) -> None:
    router.will(Script(ends=False))
    first, others = raw("/v1/completions", body), raw("/v1/completions", TEXT) * 3
    with connect(url) as client:
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
    """When the maximum number of requests wait, the server stops reading. It refuses none of them."""
    router.will(Script(ends=False))
    with connect(url) as client:
        client.sendall(raw("/v1/completions", {**TEXT, "timeout": 0.5}))
        router.wait_for(lambda: bool(router.submits))
        for number in range(num):
            client.sendall(raw("/health", headers=CLOSE if number == num - 1 else b""))
            time.sleep(0.002)
        answers = b"".join(iter(lambda: client.recv(65536), b""))
    assert (answers.count(b" 408 "), answers.count(b"200 OK")) == (1, num)


def test_half_a_head_behind_an_answer_is_not_waited_for_without_end(
    serve: Callable[..., str], router: ScriptedRouter
) -> None:
    limits = ConnectionLimits(head_idle_s=0.2, head_s=1.0)
    url = serve(app_settings(access_log=False), limits=limits)
    router.will(Script(ends=False))
    began_s = time.monotonic()
    answers = say(url, raw("/v1/completions", {**TEXT, "timeout": 0.3}) + b"GET /health HTTP/1.1\r\nHost")
    assert answers.count(b"HTTP/1.1 408 ") == 2
    assert time.monotonic() - began_s < 5
