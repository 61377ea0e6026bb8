"""The bytes of a stream on the socket, and clients that disconnect at any moment."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest

from inferd.engine.api.wire.messages import Failure
from inferd.server.config.settings import Settings
from inferd.server.endpoints import respond
from inferd.server.observability.metrics import Metrics
from inferd.server.text.control_tokens import Rendered
from inferd.server.text.model import ServedModel
from tests.api.conftest import app_settings

from .conftest import serving
from .wire import raw, say

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": [1, 2, 3]}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
EVENTS = re.compile(rb"(data: \{[^\n]+\}\n\n)+data: \[DONE\]\n\n")


@contextmanager
def connected(url: str, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request on a socket of our own, which can be closed at any moment."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((urlsplit(url).hostname or "", urlsplit(url).port or 0), timeout=20) as client:
        client.sendall(head.encode() + data)
        yield client


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_the_bytes_are_exact(http: httpx.Client, path: str, body: dict[str, Any], options: dict[str, Any]) -> None:
    response = http.post(path, json={**body, **options, "stream": True})
    assert EVENTS.fullmatch(response.content)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"]
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert all(isinstance(chunk["choices"], list) for chunk in chunks)
    assert all(("usage" in chunk) == bool(options) for chunk in chunks)
    assert [chunk["choices"] == [] for chunk in chunks] == [False] * (len(chunks) - 1) + [bool(options)]
    if not options:
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_tokens_are_sent_as_they_come(url: str, router: Any, script: Any) -> None:
    """The first tokens are sent before the engine has the others."""
    router.will(script(text="one two", ends=False))
    with connected(url, "/v1/completions", {**TEXT, "stream": True}) as client:
        received = b""
        while b" two" not in received:
            received += client.recv(65536)
        assert b"[DONE]" not in received


def test_silence_is_filled_with_comments(serve: Callable[[Settings], str], router: Any, script: Any) -> None:
    url = serve(app_settings(access_log=False), keep_alive_s=0.01)
    router.will(script(text="one", ends=False))
    with connected(url, "/v1/completions", {**TEXT, "stream": True}) as client:
        received = b""
        while received.count(b": keep-alive\n\n") < 3:
            received += client.recv(65536)
        assert b'"text":"one"' in received


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["", "some words of an answer"], ids=["before any token", "in decode"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_aborts_every_choice(
    url: str, router: Any, script: Any, path: str, body: dict[str, Any], stream: bool, text: str, n: int
) -> None:
    router.will(script(text=text, ends=False))
    with connected(url, path, {**body, "stream": stream, "n": n}) as client:
        router.wait_for(lambda: len(router.submits) == n)
        if stream and text:
            assert client.recv(1)
    router.wait_for(lambda: len(router.aborted) == n)
    assert set(router.aborted) == {submit.request_id for submit in router.submits}


def test_a_client_that_closes_one_stream_leaves_the_others(url: str, router: Any, script: Any) -> None:
    router.will(script(text="x", ends=False), script(text="one two three"))
    with connected(url, "/v1/completions", {**TEXT, "stream": True}) as client:
        router.wait_for(lambda: len(router.submits) == 1)
        client.close()
        assert EVENTS.fullmatch(httpx.post(f"{url}/v1/completions", json={**TEXT, "stream": True}).content)
    router.wait_for(lambda: set(router.aborted) == {router.submits[0].request_id})


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"failure": Failure("numerical_error", "The logits hold a NaN.")}, "numerical_error"),
        ({"dies": True}, "engine_error"),
        ({"breaks": True}, None),
    ],
)
@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_ends_a_stream_with_an_error_and_an_answer_with_a_status(
    http: httpx.Client, router: Any, script: Any, path: str, body: dict[str, Any], fields: Any, code: str | None, n: int
) -> None:
    router.will(script(text="one two", **fields), script(text="other", ends=False))
    events = http.post(path, json={**body, "n": n, "stream": True}).content.decode().split("\n\n")
    assert events[-1] == ""
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert (error["code"], error["type"], error["param"]) == (code, "server_error", None)
    assert "choices" in json.loads(events[0].removeprefix("data: "))
    router.reset()
    router.will(script(text="one two", **fields), script(text="other", ends=False))
    response = http.post(path, json={**body, "n": n})
    assert (response.status_code, response.json()["error"]) == (500, error)
    assert "secret" not in response.text
    assert error["message"]
    if n == 2:
        router.wait_for(lambda: any(key.endswith("-1") for key in router.aborted))


def test_a_failure_before_the_first_token_has_its_own_status(http: httpx.Client, router: Any, script: Any) -> None:
    router.will(script(token_ids=(), failure=Failure("context_length_exceeded", "It can never fit.", "prompt")))
    response = http.post("/v1/completions", json={**TEXT, "stream": True})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.headers["content-type"] == "application/json"


def test_an_engine_that_aborts_says_so(http: httpx.Client, router: Any, script: Any) -> None:
    """The engine may end a request early. The text so far remains, with the finish reason `length`."""
    router.will(script(token_ids=()))
    answer = http.post("/v1/completions", json=TEXT).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")


class Gate:
    """A chat template whose duration a test sets."""

    source = ""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def read(self, conversation: object, limits: object, notices: object) -> Rendered:
        self.entered.set()
        assert self.opened.wait(20)
        return Rendered("x")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 4, "messages": CHAT["messages"]}),
    ],
)
def test_a_client_that_goes_away_while_its_prompt_is_read_is_noticed_at_once(
    model: ServedModel, router: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    """The client disconnects while the template is rendered, and nothing is ever submitted."""
    gate = Gate()
    slow = replace(model, template=cast("Any", gate))
    metrics = Metrics("tiny")
    try:
        with serving(slow, router, app_settings(access_log=False), metrics=metrics) as url:
            with connected(url, path, {**body, "stream": stream}):
                assert gate.entered.wait(20)
            deadline = time.monotonic() + 20
            while metrics.http.values.get((path, "POST", "499")) != 1.0:
                assert time.monotonic() < deadline, metrics.http.values
                time.sleep(0.005)
            gate.opened.set()
            assert httpx.get(f"{url}/live").status_code == 200
    finally:
        gate.opened.set()
    assert not router.submits


def test_a_client_that_leaves_a_large_plain_answer_is_no_error(
    model: ServedModel, router: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer has begun, so no handler can answer its error, which would be logged with its stack."""
    left = threading.Event()

    def cut(document: object) -> Iterator[bytes]:
        yield b"{"
        assert left.wait(20)
        yield b"}"

    monkeypatch.setattr(respond, "_LARGE_ANSWER", 0)
    monkeypatch.setattr(respond, "pieces", cut)
    metrics = Metrics("tiny")
    try:
        with serving(model, router, app_settings(access_log=False), metrics=metrics) as url:
            with connected(url, "/v1/completions", TEXT) as client:
                assert client.recv(1024).startswith(b"HTTP/1.1 200 OK\r\n")
            deadline = time.monotonic() + 20
            while metrics.http.values.get(("/v1/completions", "POST", "200")) != 1.0:
                assert time.monotonic() < deadline, metrics.http.values
                time.sleep(0.005)
    finally:
        left.set()
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_no_chunks(url: str, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """HTTP/1.0 has no chunks. The end of the connection ends a body without a stated length."""
    monkeypatch.setattr(respond, "_LARGE_ANSWER", 0)
    answer = say(url, raw("/v1/completions", {**TEXT, "stream": stream}).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-length" not in head
    assert b"transfer-encoding" not in head
    assert EVENTS.fullmatch(body) if stream else json.loads(body)["choices"]
