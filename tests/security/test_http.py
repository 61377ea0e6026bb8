"""S6: bytes that are no request, or a request without end. Each gets an error or ends in time, and others go on."""

from __future__ import annotations

import json
import logging
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from inferd.engine.api.errors import ConfigError
from inferd.server.text.model import ServedModel
from inferd.server.transport import connection
from inferd.server.transport.connection import Connection
from inferd.server.transport.limits import ConnectionLimits, fit_open_files
from tests.api.conftest import Script, ScriptedRouter, app_settings, model, serving
from tests.e2e.conftest import Daemon, free_model, start

__all__ = ["model", "start"]

LIMITS = ConnectionLimits(max_connections=300, head_idle_s=0.3, head_s=0.8, linger_s=0.3, stall_s=0.3)
BODY_IDLE_S = 0.3
WAIT_S = 20.0
"""Time limit of the test, which is long because the machine may be busy."""
HOST = b"Host: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = b'{"prompt": "hi"}'


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    router: ScriptedRouter

    def connect(self, receive_bytes: int = 0) -> socket.socket:
        """`receive_bytes`: size of the kernel's buffer, or 0 for the default."""
        address = urlsplit(self.url)
        client = socket.socket()
        client.settimeout(WAIT_S)
        if receive_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.connect((address.hostname, address.port))
        return client

    def answer(self, *pieces: bytes) -> bytes:
        """All bytes until the server closes."""
        with self.connect() as client:
            for piece in pieces:
                client.sendall(piece)
            return read_all(client)

    def is_well(self) -> bool:
        return httpx.get(self.url + "/live", timeout=WAIT_S).status_code == 200


@pytest.fixture(scope="module")
def server(model: ServedModel) -> Iterator[Server]:
    router = ScriptedRouter(model)
    settings = app_settings(access_log=False)
    with serving(model, router, settings, limits=LIMITS, body_idle_s=BODY_IDLE_S) as url:
        yield Server(url, router)


@pytest.fixture(scope="module")
def locked_server(model: ServedModel) -> Iterator[Server]:
    """A server that requires a key, with deadlines that end no connection."""
    settings = app_settings(access_log=False, api_key=("sk-x",))
    router = ScriptedRouter(model)
    limits = replace(LIMITS, linger_s=10 * WAIT_S)
    with serving(model, router, settings, limits=limits, body_idle_s=10 * WAIT_S) as url:
        yield Server(url, router)


def read_all(client: socket.socket) -> bytes:
    """All bytes until the other side closes or aborts the connection."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def error_of(answer: bytes, status: int) -> dict[str, object]:
    """The error of the answer, which must be the only one."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


CHUNKED = b"Transfer-Encoding: chunked\r\n"
ONE_CHUNK = b"5\r\nhello\r\n0\r\n\r\n"
AMBIGUOUS = {
    "CL and TE": POST + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n" + ONE_CHUNK,
    "TE and CL": POST + CHUNKED + b"Content-Length: 5\r\n\r\n" + ONE_CHUNK,
    "two equal lengths": POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a list of lengths": POST + b"Content-Length: 5, 5\r\n\r\nhello",
    "a negative length": POST + b"Content-Length: -5\r\n\r\nhello",
    "a signed length": POST + b"Content-Length: +5\r\n\r\nhello",
    "a hexadecimal length": POST + b"Content-Length: 0x5\r\n\r\nhello",
    "an empty length": POST + b"Content-Length:\r\n\r\nhello",
    "a length beyond 64 bits": POST + b"Content-Length: 99999999999999999999999\r\n\r\nhello",
    "TE not chunked last": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + ONE_CHUNK,
    "TE compressed": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + ONE_CHUNK,
    "TE misspelt": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + ONE_CHUNK,
    "TE identity": POST + b"Transfer-Encoding: identity\r\n\r\nhello",
    "TE twice": POST + CHUNKED + CHUNKED + b"\r\n" + ONE_CHUNK,
    "TE before a space": POST + b"Transfer-Encoding : chunked\r\n\r\n" + ONE_CHUNK,
    "TE behind a tab": POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n" + ONE_CHUNK,
    "TE in HTTP/1.0": POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + ONE_CHUNK,
    "a negative chunk": POST + CHUNKED + b"\r\n-5\r\nhello\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": POST + CHUNKED + b"\r\nFFFFFFFFFFFFFFFFFF\r\nhello",
    "chunks by line feeds": POST + CHUNKED + b"\r\n5\nhello\n0\n\n",
    "a chunk longer than it says": POST + CHUNKED + b"\r\n3\r\nhello\r\n0\r\n\r\n",
    "no version": b"GET /live\r\n\r\n",
    "version 2.0": b"GET /live HTTP/2.0\r\n" + HOST + b"\r\n",
    "HTTP/2 at once": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /live HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /live HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "a folded header": b"GET /live HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n",
    "a bare carriage return": b"GET /live HTTP/1.1\r\n" + HOST + b"X: a\rb\r\n\r\n",
    "a NUL": b"GET /live HTTP/1.1\r\n" + HOST + b"X: a\x00b\r\n\r\n",
    "a name with a space": b"GET /live HTTP/1.1\r\n" + HOST + b"X Y: a\r\n\r\n",
    "a header without a name": b"GET /live HTTP/1.1\r\n" + HOST + b": a\r\n\r\n",
    "line feeds alone": b"GET /live HTTP/1.1\nHost: x\n\n",
    "an unknown method": b"FOO /live HTTP/1.1\r\n" + HOST + b"\r\n",
    "a method in lower case": b"get /live HTTP/1.1\r\n" + HOST + b"\r\n",
    "a tunnel": b"CONNECT x:1 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a host as target": b"GET http://evil HTTP/1.1\r\n" + HOST + b"\r\n",
    "a path that is no ASCII": b"GET /\xe9 HTTP/1.1\r\n" + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("raw", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_is_no_request_or_could_be_two_is_a_400(server: Server, raw: bytes) -> None:
    before = len(server.router.submits)
    assert error_of(server.answer(raw), 400)["type"] == "invalid_request_error"
    assert len(server.router.submits) == before
    assert server.is_well()


NEVER_ENDING = {
    "half a line": b"GET /li",
    "half a header": b"GET /live HTTP/1.1\r\nHost: x\r\nX-Slow: a",
    "no last line": b"GET /live HTTP/1.1\r\nHost: x\r\n",
}


@pytest.mark.parametrize("raw", NEVER_ENDING.values(), ids=NEVER_ENDING)
def test_a_head_that_stops_is_a_408(server: Server, raw: bytes) -> None:
    assert error_of(server.answer(raw), 408)["code"] == "deadline_exceeded"
    with server.connect() as client:
        client.sendall(GET)
        answer = b""
        while not answer.endswith(b"}"):  # head and body may come apart
            part = client.recv(65536)
            assert part, answer
            answer += part
        assert answer.startswith(b"HTTP/1.1 200 ")
        client.sendall(raw)
        assert error_of(read_all(client), 408), "also behind another request"


@pytest.mark.parametrize("raw", [b"", b"\r\n" * 4], ids=["nothing", "line ends"])
def test_a_connection_that_asks_for_nothing_is_closed_without_a_word(server: Server, raw: bytes) -> None:
    assert server.answer(raw) == b""


def test_a_head_that_comes_byte_by_byte_has_one_deadline_in_all(server: Server) -> None:
    """The client is never silent for as long as it may be."""
    with server.connect() as client:
        dripping = drip(client, b"GET /live HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"a" * 10_000)
        assert error_of(read_all(client), 408)["code"] == "deadline_exceeded"
    dripping.join()


def test_a_body_that_comes_byte_by_byte_must_keep_a_pace(server: Server) -> None:
    for head in (b"Content-Length: 10000\r\n\r\n", CHUNKED + b"\r\n"):
        piece = b"1\r\n \r\n" if b"chunked" in head else b" "
        with server.connect() as client:
            client.sendall(POST + head)
            dripping = drip(client, piece * 10_000, len(piece))
            answer = read_all(client)
        dripping.join()
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert b"bytes per second" in answer


def test_a_body_that_comes_slowly_but_well_is_taken(server: Server) -> None:
    body = BODY[:-1] + b" " * 100_000 + b"}"
    half = len(body) // 2
    with server.connect() as client:
        client.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:half])
        time.sleep(BODY_IDLE_S / 2)
        client.sendall(body[half:])
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


def drip(client: socket.socket, data: bytes, step: int = 1) -> threading.Thread:
    """Sends `step` bytes every 20 ms, until the other side closes."""

    def work() -> None:
        try:
            for start in range(0, len(data), step):
                client.sendall(data[start : start + step])
                time.sleep(0.02)
        except OSError:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_the_rest_of_a_body_that_was_answered_is_not_awaited(server: Server) -> None:
    """The head alone is answered. The answer arrives, and the connection ends although the body goes on."""
    with server.connect() as client:
        client.sendall(POST + b"Content-Length: 99999999999\r\n\r\n" + b"x" * 100)
        dripping = drip(client, b" " * 100_000)
        answer = read_all(client)
    dripping.join()
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_what_is_in_many_small_chunks_is_taken(server: Server) -> None:
    chunks = b"".join(b"1;ignored=yes\r\n%c\r\n" % byte for byte in BODY)
    trailer = b"0\r\nX-Request-Timeout: nonsense\r\n\r\n"
    answer = server.answer(POST + b"Connection: close\r\n" + CHUNKED + b"\r\n" + chunks + trailer)
    assert answer.startswith(b"HTTP/1.1 200 "), "a trailer is no header"


NUM_FRAMING = 200_000
"""Bytes of framing: more than the server accepts, and few enough to be sent at once."""
ENDLESS_FRAMING = {
    "a trailer's name": b"0\r\n" + b"a" * NUM_FRAMING,
    "a trailer's value": b"0\r\nA: " + b"a" * NUM_FRAMING,
    "many trailers": b"0\r\n" + b"A: a\r\n" * (NUM_FRAMING // 6),
    "many empty trailers": b"0\r\n" + b"a:\r\n" * (NUM_FRAMING // 4),
    "an extension": b"1;" + b"a" * NUM_FRAMING,
    "a quoted extension": b'1;a="' + b"a" * NUM_FRAMING,
    "many extensions": b"1" + b";a=b" * (NUM_FRAMING // 4),
    "an extension a chunk": (b"1;" + b"a" * 100 + b"\r\nx\r\n") * (NUM_FRAMING // 107),
    "an extension behind the last chunk": b"0;" + b"a" * NUM_FRAMING,
    "zeros before a size": b"0" * NUM_FRAMING,
}


@pytest.mark.parametrize("framing", ENDLESS_FRAMING.values(), ids=ENDLESS_FRAMING)
@pytest.mark.parametrize("head", [b"", b"Authorization: Bearer sk-x\r\n", b"Content-Encoding: gzip\r\n"])
@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_neither_head_nor_data_ends_the_connection(
    locked_server: Server, framing: bytes, head: bytes, is_late: bool
) -> None:
    """Before or after the answer, with a key or without, the rest is not read, and there is only one answer."""
    with locked_server.connect() as client:
        client.sendall(POST + head + CHUNKED + b"\r\n" + b"1\r\n{\r\n")
        answer = client.recv(65_536) if is_late and b"sk-x" not in head else b""
        sender = drip(client, framing, 50_000)
        answer += read_all(client)
    sender.join()
    assert answer.count(b"HTTP/1.1 ") <= 1, answer
    assert re.match(rb"HTTP/1.1 4\d\d ", answer) or not answer, "not answered as if it were whole"
    assert locked_server.is_well()


def test_framing_within_the_bounds_is_no_matter(server: Server) -> None:
    """Small chunks with one extension each, and trailers, as proxies and SDKs send them."""
    padded = BODY[:-1] + b" " * 3_000 + b"}"
    chunks = b"".join(b"1;ext=yes\r\n%c\r\n" % byte for byte in padded)
    trailers = b"0\r\n" + b"".join(b"X-Sum-%d: %s\r\n" % (i, b"a" * 64) for i in range(16)) + b"\r\n"
    last = POST + b"Connection: close\r\n" + CHUNKED + b"\r\n" + chunks + trailers
    answers = server.answer((POST + CHUNKED + b"\r\n" + chunks + trailers) * 3 + last)
    assert answers.count(b"HTTP/1.1 200 ") == 4


def test_one_turn_of_the_loop_parses_only_so_much(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is not blocked, however many tiny chunks one read contains."""
    seen: list[int] = []
    parse = Connection._parse

    def counted(self: Connection, data: bytes) -> None:
        parse(self, data)
        seen.append(self._num_events)

    monkeypatch.setattr(Connection, "_parse", counted)
    body = BODY[:-1] + b" " * 200_000 + b"}"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    answer = server.answer(POST + b"Connection: close\r\n" + CHUNKED + b"\r\n" + chunks)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert sum(seen) >= len(body)
    assert max(seen) <= connection._MAX_EVENTS + connection._PIECE_BYTES / 6 + 1


TOO_LARGE = {
    "a long path": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "a long header": b"GET /live HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    "long headers": b"GET /live HTTP/1.1\r\n" + HOST + b"".join(b"X%d: %s\r\n" % (i, b"a" * 9_000) for i in range(9)),
    "a header without end": b"GET /live HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 1_000_000,
    "many headers": b"GET /live HTTP/1.1\r\n" + HOST + b"X: a\r\n" * 300 + b"\r\n",
}


@pytest.mark.parametrize("raw", TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_head_that_is_too_large_is_a_431(server: Server, raw: bytes) -> None:
    with server.connect() as client:
        sender = drip(client, raw, 100_000)
        answer = read_all(client)
    sender.join()
    if answer:  # what is still on its way when the server closes may break the connection
        assert error_of(answer, 431)["code"] == "head_too_large"
    assert server.is_well()


def test_requests_behind_each_other_are_answered_in_order_and_bounded(server: Server) -> None:
    paths = [f"/v1/models/none-{i}" for i in range(LIMITS.max_pipelined)]
    heads = b"".join(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode() for path in paths)
    answer = server.answer(heads + b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert re.findall(rb"`(none-\d+)`", answer) == [path.rpartition("/")[2].encode() for path in paths]
    assert len(re.findall(rb"HTTP/1.1 ", answer)) == len(paths) + 1
    many = server.answer(GET * 5_000 + b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert len(re.findall(rb"HTTP/1.1 200 ", many)) == 5_001


def test_requests_with_bodies_behind_each_other_are_all_answered(server: Server) -> None:
    """More requests than may wait, in few reads. The server holds the later bytes, and parses them in turn."""
    tricky = b'{"prompt": "hi", "user": "\\r\\n\\r\\n"}  \r\n\r\n\r\n\r\n'
    sized = POST + b"Content-Length: %d\r\n\r\n" % len(tricky) + tricky
    chunked = POST + CHUNKED + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(tricky), tricky)
    upgrade = GET[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    last = GET[:-2] + b"Connection: close\r\n\r\n"
    for request in (sized, chunked, upgrade, sized + chunked + b"\r\n" + GET + upgrade):
        num = 100 * max(1, request.count(b" HTTP/1.1"))
        data = request * 100 + last
        for size in (len(data), 1_000):
            pieces = [data[start : start + size] for start in range(0, len(data), size)]
            assert server.answer(*pieces).count(b"HTTP/1.1 200 ") == num + 1


def test_a_query_of_many_parameters_is_refused_at_once(server: Server) -> None:
    for name in (b"include", b"include[]", b"a", b"after", b""):
        query = b"&".join([name] * (60_000 // (len(name) + 1)))
        for path in (b"/v1/responses/x", b"/v1/responses/x/input_items"):
            answer = server.answer(
                b"GET " + path + b"?" + query + b" HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
            )
            assert answer.startswith(b"HTTP/1.1 400 "), answer


def test_a_request_for_http_2_is_answered_in_http_1_body_and_all(server: Server) -> None:
    """The first request of Java's client."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    sized = POST + upgrade + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    chunked = POST + upgrade + CHUNKED + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    plain = b"GET /live HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n"
    last = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    for first in (sized, chunked, plain):
        for pieces in ((first + last,), (first, last), (first[:-7], first[-7:] + last)):
            statuses = re.findall(rb"HTTP/1.1 (\d+)", server.answer(*pieces))
            assert statuses == [b"200", b"200"], (first, pieces)
    websocket = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
    assert server.answer(websocket + b"Sec-WebSocket-Key: eA==\r\n\r\n").startswith(b"HTTP/1.1 200 ")


HOSTILE_BODIES = {
    "a hundred thousand brackets": (b'{"prompt": ' + b"[" * 100_000, {}, 400),
    "brackets that close": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, 400),
    "a million digits": (b'{"prompt": "x", "seed": ' + b"9" * 1_000_000 + b"}", {}, 400),
    "a million decimals": (b'{"prompt": "x", "top_p": 0.' + b"9" * 1_000_000 + b"}", {}, 200),
    "a bomb": (b"\x1f\x8b\x08" + b"\x00" * 10_000, {"Content-Encoding": "gzip"}, 415),
    "an encoding by another name": (BODY, {"Content-Encoding": "x-gzip, identity"}, 415),
    "no encoding": (BODY, {"Content-Encoding": "Identity"}, 200),
    "another text encoding": ('{"prompt": "hi"}'.encode("utf-16"), {}, 400),
}


@pytest.mark.parametrize(("body", "headers", "status"), HOSTILE_BODIES.values(), ids=HOSTILE_BODIES)
def test_bodies_that_would_grow(server: Server, body: bytes, headers: dict[str, str], status: int) -> None:
    headers = {"Content-Type": "application/json", **headers}
    answer = httpx.post(server.url + "/v1/completions", content=body, headers=headers, timeout=WAIT_S)
    assert answer.status_code == status, answer.text
    assert len(answer.content) < 4_000


def test_bodies_are_bounded_in_all(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.server.transport.middleware.MAX_HELD_BYTES", 100)
    router = ScriptedRouter(model)
    router.will(Script(token_ids=(5,)))

    def becomes(url: str, status: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while (answer := post(url)).status_code != status:
            assert time.monotonic() < deadline, answer.text
        assert status == 200 or answer.json()["error"]["code"] == "server_is_overloaded"

    def post(url: str) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return httpx.post(url + "/v1/completions", content=BODY.ljust(60), headers=headers, timeout=WAIT_S)

    with serving(model, router, app_settings(access_log=False, max_body_bytes=90)) as url:
        with Server(url, router).connect() as other:
            other.sendall(POST + b"Content-Length: 90\r\n\r\n" + BODY.ljust(60))
            becomes(url, 503)
        becomes(url, 200)


def test_one_tenant_does_not_fill_the_room_of_all_bodies(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.server.transport.middleware.MAX_HELD_BYTES", 200)
    router = ScriptedRouter(model)
    router.will(Script(token_ids=(5,)))

    def post(url: str, key: str) -> httpx.Response:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        return httpx.post(url + "/v1/completions", content=BODY.ljust(45), headers=headers, timeout=WAIT_S)

    settings = app_settings(access_log=False, max_body_bytes=90, api_key=("sk-1", "sk-2"))
    with serving(model, router, settings) as url, ExitStack() as held:
        for _ in range(2):
            other = held.enter_context(Server(url, router).connect())
            other.sendall(POST + b"Authorization: Bearer sk-1\r\nContent-Length: 90\r\n\r\n" + BODY.ljust(60))
        deadline = time.monotonic() + WAIT_S
        while (refused := post(url, "sk-1")).status_code != 503:
            assert time.monotonic() < deadline, refused.text
        assert "The bodies of your current requests" in refused.text
        assert post(url, "sk-2").status_code == 200


def test_connections_are_bounded_and_come_back(model: ServedModel) -> None:
    router = ScriptedRouter(model)
    # No connection may idle out before the last one is made.
    limits = replace(LIMITS, max_connections=100, head_idle_s=3.0, head_s=3.0)
    with serving(model, router, app_settings(access_log=False), limits=limits) as url:
        server = Server(url, router)
        with ExitStack() as idle:
            clients = [idle.enter_context(server.connect()) for _ in range(limits.max_connections + 20)]
            refused = [client for client in clients if is_closed_with(client, b"HTTP/1.1 503 ")]
            assert len(refused) == 20
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                assert server.is_well()
                break
            except (httpx.HTTPError, AssertionError):
                assert time.monotonic() < deadline


def is_closed_with(client: socket.socket, beginning: bytes) -> bool:
    return read_all(client).startswith(beginning)


def test_whoever_takes_an_answer_slowly_gets_all_of_it(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if that takes longer than a connection may be idle. The server writes a plain response in one piece."""
    monkeypatch.setattr("inferd.server.transport.uvicorn_server.KEEP_ALIVE_S", 0.2)
    router, limits = ScriptedRouter(model), replace(LIMITS, unsent_bytes=8_192)
    router.will(Script(token_ids=(5,) * 200))
    asked = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 200}
    content = json.dumps(asked).encode()
    head = POST.replace(b"/v1/completions", b"/v1/responses") + b"Content-Length: %d\r\n\r\n" % len(content)
    with serving(model, router, app_settings(access_log=False), limits=limits) as url:
        with Server(url, router).connect(receive_bytes=8_192) as client:
            client.sendall(head + content)
            answer = client.recv(4_096)
            num_bytes = int(re.findall(rb"content-length: (\d+)", answer)[0])
            assert num_bytes > 150_000
            pause_s = 2.0 / (num_bytes / 16_384)
            while part := client.recv(16_384, socket.MSG_WAITALL):
                answer += part
                time.sleep(pause_s)
        assert len(answer.partition(b"\r\n\r\n")[2]) == num_bytes


def test_a_connection_answered_early_is_kept_as_long_as_any(model: ServedModel) -> None:
    """The rest of a body after its answer does not count as a new head."""
    router, limits = ScriptedRouter(model), replace(LIMITS, head_idle_s=0.1, linger_s=WAIT_S)
    settings = app_settings(access_log=False, api_key=("sk-x",))
    with serving(model, router, settings, limits=limits) as url, Server(url, router).connect() as client:
        client.sendall(POST + b"Content-Length: 10\r\n\r\n12345")
        assert client.recv(65_536).startswith(b"HTTP/1.1 401 ")
        client.sendall(b"67890")
        time.sleep(0.5)
        client.sendall(GET)
        assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("asked", "soft", "hard", "taken", "raised"),
    [
        (8_192, 1_024, 524_288, 8_192, 8_288),
        (8_192, 524_288, 524_288, 8_192, None),
        (8_192, INFINITE, INFINITE, 8_192, None),
        (8_192, 256, INFINITE, 8_192, 8_288),
        (8_192, 1_024, 4_096, 4_000, 4_096),
        (8_192, 256, 256, 160, None),
        (900, 500, 1_000, 900, 996),
        (900, 500, 600, 504, 600),
        (4, 60, 100, 4, 100),
        (16, 60, 111, None, 111),
        (8_192, 64, 64, None, None),
    ],
)
def test_connections_fit_the_files_that_may_be_open(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: int,
    soft: int,
    hard: int,
    taken: int | None,
    raised: int | None,
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: set_to.append(limits))
    limits = ConnectionLimits(max_connections=asked)
    with caplog.at_level(logging.WARNING, "inferd.server"):
        if taken is None:
            with pytest.raises(ConfigError, match="raise the hard limit"):
                fit_open_files(limits)
        else:
            assert fit_open_files(limits).max_connections == taken
    assert set_to == ([] if raised is None else [(raised, hard)])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (taken not in (None, asked))
    assert all(text.endswith(f"or set --max-connections {taken}") for text in said)


def test_a_server_with_few_files_serves_as_many_as_it_says(
    start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real server with `ulimit -n 256`. The files of its engine count too."""
    few = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *free_model(1.0))
    daemon = start("--no-access-log", program=few)
    address = urlsplit(daemon.url)
    with ExitStack() as held:
        for _ in range(150):
            client = held.enter_context(socket.create_connection((address.hostname, address.port), timeout=WAIT_S))
            client.sendall(GET.replace(b"Host: x", b"Host: localhost"))
            assert client.recv(65_536).startswith(b"HTTP/1.1 200 ")
        others = [held.enter_context(socket.create_connection((address.hostname, address.port))) for _ in range(30)]
        assert sum(is_closed_with(client, b"HTTP/1.1 503 ") for client in others[10:]) == 20


def test_whoever_takes_nothing_of_an_answer_is_not_waited_for(server: Server) -> None:
    """A stream that makes no progress ends. Its choices are aborted, and nothing of it is kept."""
    router = server.router
    router.reset()
    router.will(Script(token_ids=(5,) * 200, ends=False))
    body = {"prompt": "x", "stream": True, "n": 64, "logprobs": 20, "max_tokens": 200, "ignore_eos": True}
    content = json.dumps(body).encode()
    with server.connect(receive_bytes=4_096) as client:
        client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        router.wait_for(lambda: len(router.submits) == 64 and len(router.aborted) == 64)
        assert not read_all(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert server.is_well()


NUM_SLOW, NUM_ASKED = 5_000, 400


@pytest.mark.long
def test_s6_thousands_of_slow_connections_leave_others_alone(start: Callable[..., Daemon]) -> None:
    """Heads that never end, at a real server with its own deadlines: their memory, and their effect on others."""
    daemon = start("--no-access-log", may_fork=False)
    address = urlsplit(daemon.url)
    process = psutil.Process(daemon.process.pid)

    def times_s() -> list[float]:
        taken = []
        with httpx.Client(base_url=daemon.url, timeout=WAIT_S) as client:
            for _ in range(NUM_ASKED):
                taken.append(client.post("/tokenize", json={"prompt": "Once"}).elapsed.total_seconds())
        return sorted(taken)

    times_s()
    alone, before = times_s(), process.memory_info().rss
    with ExitStack() as held:
        clients = [
            held.enter_context(socket.create_connection((address.hostname, address.port), timeout=40))
            for _ in range(NUM_SLOW)
        ]
        for client in clients:
            client.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nX-Slow: a")
        grown, beside = process.memory_info().rss - before, times_s()
        held_s = time.monotonic()
        num_answered = sum(is_closed_with(client, b"HTTP/1.1 408 ") for client in clients)
    p99 = [values[int(len(values) * 0.99)] * 1e3 for values in (alone, beside)]
    print(
        f"S6: {NUM_SLOW} slow connections: RSS +{grown / 2**20:.1f} MiB, p99 {p99[0]:.2f} ms alone, {p99[1]:.2f} ms "
        f"beside them, all ended {time.monotonic() - held_s:.1f} s later, {num_answered} with a 408"
    )
    assert grown < 50 * 2**20
    assert num_answered == NUM_SLOW
