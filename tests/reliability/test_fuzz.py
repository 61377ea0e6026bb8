"""Thousands of faulty requests. Each gets an answer of its route's type or an error, and leaves nothing behind."""

from __future__ import annotations

import http.client
import json
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from pydantic import TypeAdapter

from inferd.server.endpoints.route import Route
from inferd.server.endpoints.routes import ROUTES
from inferd.server.errors import anthropic as anthropic_errors
from tests.e2e.conftest import Daemon
from tests.e2e.test_boundaries import check_anthropic_error, check_error
from tests.e2e.test_client import wait_idle

from .conftest import restarts, wait_until
from .fuzzing import Request, pairs, requests

NUM_SHORT, NUM_LONG = 1_000, 10_000
NUM_PAIRS_SHORT, NUM_PAIRS_LONG = 30, 2_000
MAX_GROWTH = 64 * 2**20
"""Maximum growth of the server in bytes after requests of any kind."""
NUM_CLIENTS = 8
_FILES_OF_A_WORKER = 3
"""Two sockets of the server, and one of the process that forked it."""
SEED = 20_261_121

Answer = tuple[Request, int, bytes]


def send(url: str, some: Sequence[Request]) -> list[Answer]:
    """The answer to each request, over connections that stay open as long as the server keeps them."""
    where, answers = urlsplit(url), []
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    for request in some:
        connection.putrequest(request.method, request.path)
        for name, value in request.headers:
            connection.putheader(name, value.encode("latin-1"))
        if request.body is not None:
            connection.putheader("Content-Length", str(len(request.body)))
        connection.endheaders(request.body)
        response = connection.getresponse()
        answers.append((request, response.status, response.read()))
    connection.close()
    return answers


def send_all(url: str, all_requests: list[Request]) -> list[Answer]:
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        parts = pool.map(lambda i: send(url, all_requests[i::NUM_CLIENTS]), range(NUM_CLIENTS))
        return [answer for part in parts for answer in part]


def check(request: Request, status: int, answer: bytes) -> None:
    """Checks that a request is served, or refused in the shape of its path's API, and never with a server error."""
    told = (request.method, request.path[:100], request.headers, (request.body or b"")[:600], status, answer[:400])
    assert 200 <= status < 500, told
    assert b'"type":"server_error"' not in answer and b'"type":"api_error"' not in answer, told
    if status >= 400 and request.method != "HEAD":
        is_theirs = anthropic_errors.is_anthropic(request.path.partition("?")[0])
        (check_anthropic_error if is_theirs else check_error)(request.body or b"", answer)
    if status == 200 and request.method != "HEAD":
        check_type(request, answer)


def check_type(request: Request, answer: bytes) -> None:
    """Checks the body of an answer, or the events of its stream, against the types of its route."""
    path = request.path.partition("?")[0]
    route = next((one for one in ROUTES if (one.method, one.path) == (request.method, path)), None)
    if route is None or route.answer in (str, bytes):
        return
    body, event = adapters(route)
    if not answer.startswith((b"data: ", b"event: ", b": ")):
        body.validate_python(json.loads(answer), strict=True)
        return
    for line in answer.splitlines():
        if line.startswith(b"data: {"):
            event.validate_python(json.loads(line.removeprefix(b"data: ")), strict=True)


@cache
def adapters(route: Route) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """(of its body, of an event)."""
    return TypeAdapter(route.answer), TypeAdapter(route.events)


def num_open(daemon: Daemon, grammar: str) -> int:
    """Number of open files of a daemon's processes at rest: sockets, pipes, files.

    `grammar`: a new one, so that the process that checks grammars exists each time, even if another grammar ended it.
    """
    asked = {"prompt": "x", "max_tokens": 1, "regex": grammar}
    send(daemon.url, [Request("POST", "/v1/completions", json.dumps(asked).encode())])
    wait_idle(daemon)
    process = psutil.Process(daemon.process.pid)
    family = [process, *process.children(recursive=True)]
    forkers = {one.pid for one in family if one.ppid() == process.pid and "render_process" in " ".join(one.cmdline())}
    workers = {one.pid for one in family if one.ppid() in forkers}
    # There are as many workers as renderings were in progress at once, and each has files in three processes.
    return sum(one.num_fds() for one in family if one.pid not in workers) - _FILES_OF_A_WORKER * len(workers)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One for all tests: they only ask, and compare with the state that they find."""
    served = Daemon(may_fork=False)
    try:
        served.wait_ready()
        yield served
    finally:
        served.stop(signal.SIGKILL)


@pytest.mark.timeout(900)
def test_no_request_is_answered_with_a_fault_or_leaves_anything_behind(daemon: Daemon, is_long: bool) -> None:
    pid, url = daemon.engine_pid, daemon.url
    # What is started with the first request that needs it is no leak.
    send_all(url, list(requests(SEED - 1, 200)))
    num_before = num_open(daemon, "before")
    answers = send_all(url, list(requests(SEED, NUM_LONG if is_long else NUM_SHORT)))
    for answer in answers:
        check(*answer)
    statuses = Counter(status for _, status, _ in answers)
    assert statuses[200] > len(answers) // 10 and statuses[400] > len(answers) // 4, statuses
    # The server may close a connection a moment after its client did. What leaks stays open.
    wait_until(lambda: num_open(daemon, "after") <= num_before, within_s=10.0, what=f"at most {num_before} open files")
    assert (daemon.engine_pid, restarts(daemon)) == (pid, 0)


def resident(daemon: Daemon) -> int:
    """Memory of the server process in bytes."""
    return int(psutil.Process(daemon.process.pid).memory_info().rss)


@pytest.mark.timeout(900)
def test_no_two_fields_together_are_more_than_each(daemon: Daemon, is_long: bool) -> None:
    """Requests at two bounds are answered and their memory is freed, because products of fields have bounds too."""
    pid, url = daemon.engine_pid, daemon.url
    send(url, list(pairs(SEED - 1, 20)))
    num_bytes = resident(daemon)
    # One at a time: beside others a request with 2,048 choices finds no room in the queue, and that tells nothing.
    answers = send(url, list(pairs(SEED, NUM_PAIRS_LONG if is_long else NUM_PAIRS_SHORT)))
    for answer in answers:
        check(*answer)
    codes = Counter(json.loads(answer)["error"].get("code") for _, status, answer in answers if status == 400)
    assert codes["request_exceeds_work_limit"], codes
    assert Counter(status for _, status, _ in answers)[200] > len(answers) // 10
    assert (daemon.engine_pid, restarts(daemon)) == (pid, 0)
    assert resident(daemon) <= num_bytes + MAX_GROWTH


@pytest.mark.parametrize(
    ("path", "status", "answer"),
    [
        ("/v1/completions", 500, b'{"error":{"message":"x","type":"server_error","param":null,"code":null}}'),
        ("/v1/completions", 200, b'data: {"error":{"message":"x","type":"server_error","param":null,"code":null}}'),
        ("/v1/completions", 200, b'{"object":"text_completion"}'),
        ("/v1/completions", 200, b'data: {"object":"text_completion"}'),
        ("/v1/completions", 400, b"Invalid HTTP request received."),
        ("/v1/completions", 400, b'{"detail":"x"}'),
        ("/v1/completions", 400, b'{"error":{"message":"x","type":"invalid_request_error","param":null,"code":"new"}}'),
        ("/v1/messages", 400, b'{"error":{"message":"x","type":"invalid_request_error","param":null,"code":null}}'),
    ],
)
def test_what_checks_answers_sees_each_kind_of_fault(path: str, status: int, answer: bytes) -> None:
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check(Request("POST", path, b"{}"), status, answer)


def test_one_seed_makes_one_list_and_every_route_is_in_it() -> None:
    made = list(requests(SEED, 400))
    assert made == list(requests(SEED, 400))
    assert {route.path for route in ROUTES if route.fields is not None} <= {
        item.path.partition("?")[0] for item in made
    }
    assert len({item.body for item in made}) > 280, "85% have a body, and few of those are alike"
