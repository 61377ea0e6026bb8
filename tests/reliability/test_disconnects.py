"""R11: a client that disconnects in any state of its request leaves nothing behind: no block and no running choice."""

from __future__ import annotations

import json
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.conftest import FRESH
from tests.e2e.conftest import Daemon
from tests.reliability.conftest import WITHOUT_CACHE

SHORT_DROPS, LONG_DROPS = 48, 1_000
NUM_AT_ONCE = 12
NUM_SLOTS = 4
"""Maximum number of requests in a step. The others of `NUM_AT_ONCE` are in the queue."""
POLL_S = 0.002
PROMPT = "The quick brown fox jumps over the lazy dog. " * 40
USER: Any = [{"role": "user", "content": "Tell me about rivers."}]
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1_000, "ignore_eos": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/completions", LONG),
    "stream": ("/v1/completions", {**LONG, "stream": True}),
    "choices": ("/v1/completions", {**LONG, "n": 3, "stream": True}),
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 1_000, "ignore_eos": True}),
    "responses": ("/v1/responses", {"input": PROMPT, "max_output_tokens": 1_000, "ignore_eos": True}),
    "responses, streamed": ("/v1/responses", {"input": PROMPT, "ignore_eos": True, "stream": True}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 1_000, "ignore_eos": True}),
    "messages, streamed": (
        "/v1/messages", {"messages": USER, "max_tokens": 1_000, "ignore_eos": True, "stream": True},
    ),
    "embeddings": ("/v1/embeddings", {"input": [PROMPT] * 200}),
}  # fmt: skip
"""Requests that take seconds if their clients stay."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    served = Daemon(WITHOUT_CACHE, "--max-num-seqs", str(NUM_SLOTS), "--no-access-log")
    served.wait_ready()
    yield served
    served.stop(signal.SIGKILL)


def drop(daemon: Daemon, kind: str, rng: random.Random) -> None:
    """Ask and disconnect: at once, after a while, or during the answer; sometimes by a reset (RST)."""
    path, body = KINDS[kind]
    raw = json.dumps(body).encode()
    address = urlsplit(daemon.url)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=60) as client:
        client.sendall(head.encode() + raw)
        if body.get("stream") and rng.random() < 0.5:
            client.recv(rng.choice((1, 2_000, 20_000)))
        else:
            time.sleep(rng.choice((0.0, rng.random() * 0.05, rng.random() * 0.5)))
        if rng.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def wait_idle(http: httpx.Client) -> float:
    """Seconds until nothing runs, waits or holds a block. The time limit keeps a broken test from hanging."""
    began = time.monotonic()
    while True:
        state = http.get("/state").json()
        held = (state["requests"]["running"], state["requests"]["waiting"], state["kv_cache"]["used"])
        passed_s = time.monotonic() - began
        if not any(held):
            return passed_s
        assert passed_s < 20, held
        time.sleep(POLL_S)


def test_r11_whoever_goes_leaves_nothing_behind(daemon: Daemon, is_long: bool) -> None:
    """First one client at a time, to measure how long its blocks stay; then many at once, most of them in the queue.

    No answer is complete, because it takes longer than any client stays.
    """
    num_drops = LONG_DROPS if is_long else SHORT_DROPS
    rng = random.Random(num_drops)
    ended = finished(daemon, "length")
    with httpx.Client(base_url=daemon.url, timeout=60, headers=FRESH) as http:
        times_s = []
        for number in range(num_drops // 2):
            drop(daemon, list(KINDS)[number % len(KINDS)], rng)
            times_s.append(wait_idle(http))
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            for _ in range(num_drops // 2 // NUM_AT_ONCE):
                kinds = rng.choices(list(KINDS), k=NUM_AT_ONCE)
                list(threads.map(lambda kind: drop(daemon, kind, random.Random(kind)), kinds))
                wait_idle(http)
        steps_ms = http.get("/state").json()["last_minute"]
    times_s.sort()
    middle, p99 = (times_s[int(len(times_s) * share)] * 1e3 for share in (0.5, 0.99))
    print(f"R11: {num_drops} clients gone; of one alone, all was free {middle:.0f} ms later (p99 {p99:.0f} ms)")
    print({phase: facts["median_step_ms"] for phase, facts in steps_ms.items() if facts})
    assert finished(daemon, "length") == ended, "somebody's answer was computed to its end"
    page = daemon.get("/metrics").text
    answers = [line for line in page.splitlines() if line.startswith("inferd_http_requests_total{")]
    vectors = [line for line in answers if 'route="/v1/embeddings"' in line]
    assert vectors and not any('status="200"' in line for line in vectors), "somebody's vectors were all computed"
    assert finished(daemon, "abort") > 0
    with httpx.Client(base_url=daemon.url, timeout=60) as http:
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def finished(daemon: Daemon, reason: str) -> float:
    page = daemon.get("/metrics").text
    return next(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith("inferd_requests_finished_total{") and f'finish_reason="{reason}"' in line
    )
