"""Small requests that would be much work. Each is soon answered or refused, alone and all at once, and leaves nothing.

Other cases of the same kinds are in `test_grammars`, `test_http`, `test_long_texts` and
`tests/api/test_event_loop`, which measures the event loop.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.conftest import INFERD, Daemon, daemon, start
from tests.reliability.conftest import wait_until
from tests.security.test_grammars import tags_in_tags
from tests.security.test_long_texts import Memory, limited

__all__ = ["daemon", "start"]

MAX_GROWTH_MIB = 64
NUM_AT_ONCE = 8
ROUNDS = 4
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def post(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(raw) + raw


def get(target: str) -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()


def chat(**fields: Any) -> bytes:
    return post("/v1/chat/completions", {**CHAT, **fields})


def completion(**fields: Any) -> bytes:
    return post("/v1/completions", {"prompt": [5], "max_tokens": 1, **fields})


def schema(**keywords: Any) -> bytes:
    form = {"name": "x", "strict": True, "schema": {"type": "number", **keywords}}
    return chat(response_format={"type": "json_schema", "json_schema": form})


def arguments(text: str) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    return chat(messages=[*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}])  # type: ignore[misc]


def turns(num: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "a" * 100}]}] * num


def trailers() -> bytes:
    body = b"2\r\n{}\r\n0\r\n" + b"X-A: " + b"a" * 16_000_000 + b"\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + body


TOOLS = [
    {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "description": "x" * 60_000}}}
    for i in range(18)
]
STOPS = ["a" * 999 + chr(97 + i) for i in range(16)]

CASES: dict[str, tuple[int, Callable[[], bytes]]] = {
    "tags in tags": (200, lambda: chat(**tags_in_tags("triggered_tags", 15))),
    "stop strings times choices": (200, lambda: completion(prompt=[[5]] * 16, n=128, stop=STOPS)),
    "prompts times choices": (400, lambda: completion(prompt=[[5]] * 2_048, n=128)),
    "log probabilities times choices": (400, lambda: completion(n=128, logprobs=20, max_tokens=2_000)),
    "lists times choices": (400, lambda: completion(prompt=[[5]] * 16, n=128, allowed_token_ids=list(range(3_000)))),
    "a bound of 401 digits": (400, lambda: schema(minimum=-(10**400))),
    "two bounds of 401 digits": (400, lambda: schema(exclusiveMinimum=-(10**400), maximum=10**400)),
    "half a character in a string in a string": (200, lambda: arguments('{"a": "\\ud800"}')),
    "64 KB of query": (400, lambda: get(f"/v1/responses/x?{'include&' * 8_000}")),
    "1 MB of tools": (200, lambda: chat(tools=TOOLS)),
    "20,000 turns of one": (400, lambda: post("/v1/messages", {"messages": turns(20_000), "max_tokens": 1})),
    "a page without a content type": (
        415, lambda: chat().replace(b"Content-Type: application/json\r\n", b""),
    ),
    "a page of another origin": (403, lambda: chat().replace(b"Host:", b"Origin: http://evil.example\r\nHost:")),
    "10 MB of digits": (200, lambda: post("/tokenize", {"prompt": "1234567890" * 100_000})),
    "10 MB of a letter, cut": (400, lambda: completion(prompt="a" * 10_000_000, truncate_prompt_tokens=9)),
    "16 MB of trailer": (400, trailers),
}  # fmt: skip


def ask(url: str, raw: bytes) -> int:
    """The status, or 0 if the connection ended before all was sent, as for a flood."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=60) as client:
        try:
            client.sendall(raw)
            answer = client.recv(65_536)
        except ConnectionError:
            return 0
    return int(answer.split(b" ", 2)[1]) if answer else 0


@pytest.fixture(scope="module")
def warm(daemon: Daemon) -> Daemon:
    """The server after one request of each case, whose memory does not count as growth."""
    for _, make in CASES.values():
        ask(daemon.url, make())
    return daemon


@pytest.mark.parametrize("name", CASES)
def test_much_work_is_answered_and_leaves_nothing(warm: Daemon, name: str) -> None:
    status, make = CASES[name]
    server, engine = Memory(warm.process.pid), Memory(warm.engine_pid)
    found = ask(warm.url, make())
    assert found == status or (found == 0 and "trailer" in name)
    assert server.peak_growth < MAX_GROWTH_MIB and engine.peak_growth < MAX_GROWTH_MIB
    wait_until(lambda: server.growth < MAX_GROWTH_MIB / 2, 60, "the memory is back")


@pytest.mark.long
def test_the_largest_answer_is_written_in_pieces(daemon: Daemon) -> None:
    """742,400 log probabilities: 55 MiB of JSON. A request of the same length comes first, so that KV blocks which are
    used for the first time do not count."""
    body = {**CHAT, "n": 128, "max_tokens": 290, "ignore_eos": True}
    httpx.post(f"{daemon.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    server, engine, stopped = Memory(daemon.process.pid), Memory(daemon.engine_pid), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(lambda: sorted(late_answers(daemon.url, stopped)))
        scored = {**body, "logprobs": True, "top_logprobs": 20}
        answer = httpx.post(f"{daemon.url}/v1/chat/completions", json=scored, timeout=120)
        stopped.set()
    choices = answer.json()["choices"]
    assert {len(token["top_logprobs"]) for choice in choices for token in choice["logprobs"]["content"]} == {20}
    print(f"server +{server.peak_growth:.0f} MiB, engine +{engine.peak_growth:.0f} MiB", end=", ")
    print(f"/live median {late.result()[len(late.result()) // 2] * 1e3:.0f} ms, worst {late.result()[-1] * 1e3:.0f} ms")
    assert server.peak_growth < MAX_GROWTH_MIB and engine.peak_growth < MAX_GROWTH_MIB
    wait_until(lambda: server.growth < MAX_GROWTH_MIB / 2, 60, "the memory is back")


def late_answers(url: str, stopped: threading.Event) -> Iterator[float]:
    """Seconds that each `/live` took, asked again and again."""
    with httpx.Client(timeout=60) as client:
        while not stopped.is_set():
            before_s = time.monotonic()
            assert client.get(f"{url}/live").status_code == 200
            yield time.monotonic() - before_s
            stopped.wait(0.05)


@pytest.mark.long
def test_a_server_of_2_gib_survives_all_of_them_at_once(start: Callable[..., Daemon]) -> None:
    """Memory of server and engine together. The delay of `/live` is printed, but not tested on a shared machine."""
    asks = list(CASES.values()) * ROUNDS
    random.Random(1).shuffle(asks)
    stopped = threading.Event()
    with limited(2 * 2**30) as group, ThreadPoolExecutor(NUM_AT_ONCE + 2) as threads:
        enter = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group))
        daemon = start("--kv-memory", "256MiB", program=(*enter, str(INFERD)))
        pid, memory = daemon.engine_pid, Memory(daemon.process.pid)
        body = {"prompt": [300], "max_tokens": 1_500, "ignore_eos": True}
        beside = threads.submit(httpx.post, daemon.url + "/v1/completions", json=body, timeout=600)
        late = threads.submit(lambda: sorted(late_answers(daemon.url, stopped)))
        found = list(threads.map(lambda case: (case[0], ask(daemon.url, case[1]())), asks))
        assert beside.result().json()["usage"]["completion_tokens"] == 1_500
        stopped.set()
        late_s = late.result()
        print(
            f"/live beside {len(asks)}: median {late_s[len(late_s) // 2] * 1e3:.0f} ms, worst {late_s[-1] * 1e3:.0f} ms"
        )
        assert not [(wanted, status) for wanted, status in found if status not in (wanted, 0, 429, 503)]
        assert daemon.engine_pid == pid, "the engine was ended"
        wait_until(lambda: memory.growth < MAX_GROWTH_MIB, 60, "the memory is back")
        assert daemon.stop() == 0
