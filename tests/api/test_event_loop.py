"""R13: no callback blocks the event loop for more than 50 ms, whatever is sent. Other streams would wait for it.

The tests measure what the process itself did between two ticks of a timer. Time without a processor does not count.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pytest

from inferd.engine.api.wire.client import EngineClient
from inferd.server.dispatch.router import Router
from inferd.server.observability.metrics import Metrics
from inferd.server.text.model import ServedModel
from tests.api.conftest import app_settings

from .conftest import LOOP_BOUND_S, Beats, serving

CONTEXT = 2_100_000
ROOT = Path(__file__).resolve().parents[2]


class Served:
    def __init__(self, url: str, beats: Beats) -> None:
        address = urlsplit(url)
        self.address = (address.hostname or "", address.port or 0)
        self.beats = beats

    def send(self, raw: bytes) -> bytes:
        """The whole answer. Bytes are made before and parsed after, because this process is measured."""
        parts = []
        with socket.create_connection(self.address, timeout=120) as client:
            try:
                client.sendall(raw)
                while part := client.recv(1 << 20):
                    parts.append(part)
            except ConnectionError:
                pass  # closed before all was sent
        return b"".join(parts)


@pytest.fixture(scope="module")
def large(model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for a context of two million tokens, with the real router and an engine process on the real wire."""
    run_dir = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "tests.api.stub_engine", str(run_dir), str(CONTEXT)]
    metrics = Metrics("tiny")
    router = Router(None, metrics)
    running: list[asyncio.Task[NoReturn]] = []

    def attach() -> None:
        router.attach(EngineClient(run_dir, 0))
        running.append(asyncio.create_task(router.run()))

    beats = Beats(time.monotonic, time.process_time)
    settings = app_settings(access_log=False)
    served_model = replace(model, max_model_len=CONTEXT)
    with ExitStack() as held:
        engine = held.enter_context(subprocess.Popen(command, cwd=ROOT))
        held.callback(engine.kill)
        url = held.enter_context(
            serving(served_model, router, settings, metrics=metrics, probe=beats.probe, on_startup=attach)
        )
        served = Served(url, beats)
        while not served.send(get("/ready")).startswith(b"HTTP/1.1 200 "):
            assert engine.poll() is None, "the stub of an engine has ended"
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
            served.send(post(path, {**BASES[path]}))  # what is made with the first request is not made again
        served.send(get("/openapi.json"))
        yield served


USER = [{"role": "user", "content": "hi"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["hi"]},
    "/v1/score": {"text_1": "hi", "text_2": "hi"},
    "/v1/classify": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}


def post(path: str, body: dict[str, Any] | bytes) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(raw) + raw


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


def chunked(path: str, raw: bytes, rest: bytes = b"0\r\n\r\n") -> bytes:
    """A body with one byte per chunk, followed by `rest`."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in raw)
    return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + rest


def changed(path: str, **fields: Any) -> bytes:
    return post(path, {**BASES[path], **fields})


MIB = 2**20
WORDS = "The quick brown fox jumps over the lazy dog. "
LONG_TEXT = WORDS * (5 * MIB // len(WORDS))
IDS = [i % 3_000 for i in range(2_000_000)]
TURNS = [{"role": "user" if i % 2 == 0 else "assistant", "content": WORDS} for i in range(10_001)]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "description": "x" * 60_000}}}
HOSTED = {"type": "web_search", "numbers": [1.2345678] * 1_450}
"""A tool that the model does not see."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def strict_tools(count: int, num_properties: int) -> list[dict[str, Any]]:
    properties = {f"p{i:03}": {"type": "integer", "description": "x" * 20} for i in range(num_properties)}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"parameters": parameters, "strict": True}
    return [{"type": "function", "function": {**function, "name": f"f{i}"}} for i in range(count)]


def deep_schema(levels: int) -> dict[str, Any]:
    """A schema with 1,000 bytes per level and bounds at the deepest. Long names make its paths even longer."""
    schema: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0, "minimum": 0.4, "maximum": 0.5}
    for _ in range(levels // 2):
        schema = {"type": "object", "properties": {"x" * 1_900: schema}, "required": []}
    return schema


def answer(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def tags_in_tags(levels: int, num_triggers: int) -> dict[str, Any]:
    form: dict[str, Any] = {"type": "any_text"}
    for _ in range(levels):
        tag = {"begin": "<" * num_triggers, "content": form, "end": ">"}
        triggers = ["<" * i for i in range(1, num_triggers + 1)]
        form = {"type": "triggered_tags", "triggers": triggers, "tags": [tag] * max(1, num_triggers // 2)}
    return {"type": "structural_tag", "format": form}


LOADS: dict[str, tuple[int, Callable[[], bytes]]] = {
    "16 MiB of space": (200, lambda: post(COMPLETIONS, b'{"prompt": "x"' + b" " * (16 * MIB - 100) + b"}")),
    "a million tokens of text": (200, lambda: post(COMPLETIONS, {"prompt": WORDS * 90_000})),
    "two million ids": (200, lambda: post(COMPLETIONS, {"prompt": IDS})),
    "a million ids, 128 times": (
        400,
        lambda: post(COMPLETIONS, {"prompt": IDS[:1_000_000], "n": 128, "max_tokens": 1}),
    ),
    "5,000 ids, scored": (200, lambda: post(COMPLETIONS, {"prompt": IDS[:5_000], "echo": True, "logprobs": 1})),
    "all log probabilities": (
        200,
        lambda: post(COMPLETIONS, {"prompt": IDS[:37_440], "prompt_logprobs": 20, "max_tokens": 1}),
    ),
    "all log probabilities of an echo": (
        200,
        lambda: post(COMPLETIONS, {"prompt": IDS[:37_400], "echo": True, "logprobs": 20, "max_tokens": 1}),
    ),
    "all log probabilities, in both forms": (
        200,
        lambda: post(
            COMPLETIONS, {"prompt": IDS[:18_700], "echo": True, "logprobs": 20, "prompt_logprobs": 20, "max_tokens": 1}
        ),
    ),
    "10,001 messages": (200, lambda: post(CHAT, {"messages": TURNS})),
    "a bias for every token": (200, lambda: changed(CHAT, logit_bias={str(i): 1 for i in range(3_072)})),
    "100 tools of 60 kB": (200, lambda: changed(CHAT, tools=[TOOL] * 100)),
    "25 strict tools of 7 kB": (200, lambda: changed(CHAT, tools=strict_tools(25, 100))),
    "128 strict tools of 60 kB": (400, lambda: changed(CHAT, tools=strict_tools(128, 1_000))),
    "a schema read on the loop": (200, lambda: changed(CHAT, response_format=answer(deep_schema(31)))),
    "a schema of 64 kB": (200, lambda: changed(CHAT, response_format=answer(deep_schema(63)))),
    "tags of 2^15 copies": (200, lambda: changed(CHAT, response_format=tags_in_tags(15, 2))),
    "pairs of triggers and tags": (400, lambda: changed(CHAT, response_format=tags_in_tags(1, 250))),
    "60,000 tags": (
        400,
        lambda: changed(
            CHAT,
            response_format={
                "type": "structural_tag",
                "format": {"type": "or", "elements": [{"type": "or", "elements": [{"type": "any_text"}] * 250}] * 240},
            },
        ),
    ),
    "a response that repeats 10 MB of tools": (
        200,
        lambda: changed("/v1/responses", tools=[HOSTED] * 650, stream=True, max_output_tokens=1),
    ),
    "a million chunks": (200, lambda: chunked(COMPLETIONS, b'{"prompt": "' + WORDS.encode() * 23_000 + b'"}')),
    "2,048 documents": (200, lambda: post("/v1/rerank", {"query": WORDS, "documents": [WORDS] * 2_048})),
    "2,048 inputs": (200, lambda: post("/v1/embeddings", {"input": [WORDS] * 2_048})),
    "2,048 choices with 16 stop strings of 1,024": (
        200,
        lambda: post(
            COMPLETIONS, {"prompt": [IDS[:9]] * 16, "n": 128, "stop": [f"{'a' * 1_020}{i}" for i in range(16)]}
        ),
    ),
    "2,048 choices of 1,000 ids, streamed": (
        200,
        lambda: post(COMPLETIONS, {"prompt": [IDS[i : i + 1_000] for i in range(2_048)], "stream": True}),
    ),
    "128 choices of 32,768 ids, each biased": (
        200,
        lambda: post(
            COMPLETIONS,
            {"prompt": IDS[:32_768], "n": 128, "logit_bias": {str(i): 1 for i in range(3_072)}, "logprobs": 5},
        ),
    ),
    "two million ids, three times": (400, lambda: post(COMPLETIONS, {"prompt": IDS, "n": 3, "max_tokens": 1})),
    "5,000 requests at once": (200, lambda: get("/live").replace(b"close", b"keep-alive") * 5_000 + get("/live")),
    "9,500 parameters": (400, lambda: get("/v1/responses/x?" + "include&" * 7_500 + "a&" * 2_000)),
    "a head of 256 headers": (200, lambda: get("/live").replace(b"\r\n\r\n", b"\r\nX: y" * 250 + b"\r\n\r\n")),
    "the metrics": (200, lambda: get("/metrics")),
    "the interface": (200, lambda: get("/openapi.json")),
}
LONG_LOADS: dict[str, tuple[int, Callable[[], bytes]]] = {
    "16 MiB of text": (400, lambda: post(COMPLETIONS, {"prompt": (WORDS * 400_000)[: 16 * MIB - 100]})),
    "a million tokens of escapes": (200, lambda: post(COMPLETIONS, {"prompt": "\u00e9t\u00e9 " * 170_000})),
    "a message of 5 MiB": (200, lambda: changed(CHAT, messages=[{"role": "user", "content": LONG_TEXT}])),
    "a response of 5 MiB": (200, lambda: changed("/v1/responses", input=LONG_TEXT)),
    "a message of 5 MiB, Anthropic": (
        200,
        lambda: changed("/v1/messages", messages=[{"role": "user", "content": LONG_TEXT}]),
    ),
    "two million ids as text": (200, lambda: post("/detokenize", {"tokens": IDS})),
    "a million tokens as ids": (200, lambda: post("/tokenize", {"prompt": WORDS * 90_000, "return_token_strs": True})),
}


FLOODS: dict[str, Callable[[], bytes]] = {
    "64 MiB of a trailer": lambda: chunked(COMPLETIONS, b"{", b"0\r\nA: " + b"a" * (64 * MIB)),
    "16 MiB of trailers": lambda: chunked(COMPLETIONS, b"{", b"0\r\n" + b"A: a\r\n" * (16 * MIB // 6)),
    "64 MiB of an extension": lambda: chunked(COMPLETIONS, b"{", b"1;" + b"a" * (64 * MIB)),
    "64 MiB of zeros before a size": lambda: chunked(COMPLETIONS, b"{", b"0" * (64 * MIB)),
}
"""Requests that are refused before they arrived in full. The client may lose the answer with the connection."""


def check(server: Served, name: str, load: Callable[[], None]) -> None:
    """Runs the load up to five times. A busy machine delays some attempts; a block by the request comes each time."""
    for _ in range(5):
        server.beats.reset()
        load()
        if server.beats.is_within_bound:
            break
    print(f"R13: {name}: {server.beats.worst_s * 1e3:.1f} ms")
    server.beats.check()


@pytest.mark.parametrize("name", LOADS)
def test_r13_one_request_holds_nobody_up(large: Served, name: str) -> None:
    status, make = LOADS[name]
    raw = make()
    check(large, name, lambda: assert_answered(answer_of(large, raw), status))


@pytest.mark.parametrize("name", FLOODS)
def test_r13_nor_does_what_is_neither_head_nor_data(large: Served, name: str) -> None:
    raw = FLOODS[name]()

    def load() -> None:
        answer = large.send(raw)
        assert not answer or answer.startswith(b"HTTP/1.1 400 "), answer[:1_000]

    check(large, name, load)


SCORED: dict[str, dict[str, Any]] = {
    "an echo": {"echo": True, "logprobs": 15},
    "a streamed echo": {"echo": True, "logprobs": 15, "stream": True},
    "scores": {"prompt_logprobs": 5},
}


@pytest.mark.parametrize("name", SCORED)
def test_r13_nor_does_a_long_scored_prompt(large: Served, name: str) -> None:
    """49,000 tokens with 784,000 log probabilities, nearly the maximum of one request, or an answer of 17 MB."""
    num_tokens = 49_000
    raw = post(COMPLETIONS, {"prompt": IDS[:num_tokens], "max_tokens": 1, **SCORED[name]})

    def load() -> None:
        answer = large.send(raw)
        assert answer.startswith(b"HTTP/1.1 200 ") and len(answer) > 10 * MIB, (len(answer), answer[:1_000])

    check(large, f"{name} of 49,000 tokens", load)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG_LOADS)
def test_r13_nor_does_a_long_one(large: Served, name: str) -> None:
    status, make = LONG_LOADS[name]
    raw = make()
    check(large, name, lambda: assert_answered(large.send(raw), status))


def answer_of(server: Served, raw: bytes) -> bytes:
    """The answer. On a busy machine a grammar may take longer than the server lets a request wait for it. The server
    then tells the client to come again."""
    for _ in range(10):
        answer = server.send(raw)
        if not answer.startswith(b"HTTP/1.1 429 "):
            return answer
        time.sleep(0.2)
    return answer


def assert_answered(answer: bytes, status: int) -> None:
    """Checks that the request was answered, because a refused one would not cause the load."""
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:1_000]


@pytest.mark.parametrize("num_connections", [1_000, pytest.param(5_000, marks=pytest.mark.long)])
def test_r13_nor_do_many_connections(large: Served, num_connections: int) -> None:
    """Opens all connections, and sends requests in waves."""
    raw, wave = get("/live"), 100

    def load() -> None:
        with ExitStack() as held:
            clients = [
                held.enter_context(socket.create_connection(large.address, timeout=60)) for _ in range(num_connections)
            ]
            for start in range(0, num_connections, wave):
                for client in clients[start : start + wave]:
                    client.sendall(raw)
                for client in clients[start : start + wave]:
                    assert client.recv(65536).startswith(b"HTTP/1.1 200 ")

    check(large, f"{num_connections} connections", load)


def test_the_probe_sees_what_holds_the_loop(large: Served) -> None:
    """The probe finds a callback of 80 ms, and a thread that holds the interpreter lock as long."""

    def on_the_loop() -> None:
        spin(0.08)

    def on_a_thread() -> None:
        asyncio.get_running_loop().run_in_executor(None, sum, range(12_000_000))

    for hold in (on_the_loop, on_a_thread):
        large.beats.reset()
        done = threading.Event()
        large.beats.loop.call_soon_threadsafe(hold)
        large.beats.loop.call_soon_threadsafe(large.beats.loop.call_later, 0.5, done.set)
        assert done.wait(20)
        assert large.beats.worst_s > LOOP_BOUND_S, hold


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_the_metrics_show_how_late_the_loop_is(large: Served) -> None:
    measured, end_s = re.compile(r"^inferd_event_loop_lag_seconds_count [1-9]", re.MULTILINE), time.monotonic() + 10
    while not measured.search(large.send(get("/metrics")).decode()):
        assert time.monotonic() < end_s, "the probe has measured nothing"
        time.sleep(0.05)
