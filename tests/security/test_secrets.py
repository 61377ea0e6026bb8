"""Keys, prompts, headers and grammars take every path, crashes included, and never appear in a log."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Daemon, start
from tests.reliability.conftest import faulty, kill_engine, restarts, wait_until

__all__ = ["start"]

KEY = "sk-canary-5f2b9c71d3e84a60"
ADMIN_KEY = "sk-admin-canary-18a7c4e09b2f"
WRONG_KEY = "sk-wrong-canary-77d0b3f5e1c6"
CANARY = "Zq7canaryKx"
"""A marker in all texts that a caller writes and only the model may read."""

HEADERS = {
    "Authorization": f"Bearer {KEY}", "Cookie": f"session={CANARY}", "User-Agent": CANARY, "X-Forwarded-For": CANARY,
    "OpenAI-Organization": CANARY, "Referer": f"http://{CANARY}/", "Proxy-Authorization": f"Basic {CANARY}",
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {CANARY: {"const": CANARY}}, "required": [CANARY]}
TOOL = {"type": "function", "function": {"name": CANARY, "description": CANARY, "parameters": SCHEMA}}
HI = [{"role": "system", "content": CANARY}, {"role": "user", "content": CANARY, "name": CANARY}]

BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": CANARY, "user": CANARY, "stop": CANARY, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": CANARY, "suffix": CANARY}),
    ("/v1/completions", {"prompt": CANARY, "model": CANARY}),
    ("/v1/completions", {"prompt": CANARY, CANARY: CANARY}),
    ("/v1/completions", {"prompt": CANARY, "temperature": CANARY}),
    ("/v1/completions", {"prompt": CANARY * 3_000}),
    ("/v1/completions", {"prompt": CANARY, "cache_salt": CANARY, "bad_words": [CANARY]}),
    ("/v1/completions", {"prompt": CANARY, "timeout": 0.001}),
    ("/v1/chat/completions", {"messages": HI, "metadata": {CANARY: CANARY}, "safety_identifier": CANARY}),
    ("/v1/chat/completions", {"messages": HI, "stream": True, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/chat/completions", {"messages": HI, "chat_template_kwargs": {CANARY: CANARY}}),
    ("/v1/chat/completions", {"messages": [{"role": CANARY, "content": CANARY}]}),
    ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"json": SCHEMA}}),
    ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"regex": f"({CANARY}"}}),
    ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"grammar": f'root ::= "{CANARY}" | {CANARY}'}}),
    (
        "/v1/chat/completions",
        {"messages": HI, "structured_outputs": {"grammar": f'start: "{CANARY}" {CANARY.lower()}'}},
    ),
    ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"json": {"$ref": f"http://{CANARY}/"}}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": CANARY}], "system": CANARY, "max_tokens": 4}),
    ("/v1/responses", {"input": CANARY, "instructions": CANARY, "background": True, "store": True}),
    ("/v1/responses", {"input": CANARY, "previous_response_id": CANARY}),
    ("/v1/embeddings", {"input": [CANARY, CANARY]}),
    ("/v1/rerank", {"query": CANARY, "documents": [CANARY, {"text": CANARY}]}),
    ("/v1/score", {"text_1": CANARY, "text_2": CANARY}),
    ("/v1/classify", {"input": CANARY}),
    ("/predict", {"inputs": [CANARY, CANARY]}),
    ("/tokenize", {"prompt": CANARY}),
    ("/v1/chat/completions/render", {"messages": HI}),
)
RAW = (
    f'{{"prompt": "{CANARY}'.encode(), f'{{"prompt": "{CANARY}", "prompt": "{CANARY}"}}'.encode(), CANARY.encode(),
    b'{"prompt": "' + CANARY.encode() + b'\xff"}', f'{{"{CANARY}": NaN}}'.encode(), f'["{CANARY}"]'.encode(),
)  # fmt: skip


@pytest.fixture
def daemon(start: Callable[..., Daemon]) -> Daemon:
    """A daemon that logs everything. Its first engine fails in a given step."""
    keys = {"INFERD_API_KEY": KEY, "INFERD_ADMIN_KEY": ADMIN_KEY}
    return start("--log-level", "debug", env=keys, program=faulty("memory@step=150@epoch=0"))


def ask(daemon: Daemon, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx.Response | None:
    content = body if isinstance(body, bytes) else json.dumps({"max_tokens": 4, **body} if is_long(path) else body)
    sent = {**HEADERS, "Content-Type": "application/json", **headers}
    with suppress(httpx.HTTPError):
        return httpx.post(f"{daemon.url}{path}?api_key={KEY}&q={CANARY}", content=content, headers=sent, timeout=30)
    return None


def is_long(path: str) -> bool:
    return path in ("/v1/completions", "/v1/chat/completions")


def hits(daemon: Daemon, *words: str) -> list[str]:
    """Lines of its log that contain one of these texts."""
    return [line for line in daemon.lines if any(word in line for word in words)]


def crash_under_load(daemon: Daemon) -> None:
    """Streams continue after an exception in the engine, and after its sudden death."""
    long = {"prompt": CANARY, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(ask, daemon, "/v1/completions", {**long, "seed": i}) for i in range(2)]
        wait_until(lambda: restarts(daemon) == 1 and daemon.get("/ready").status_code == 200, what="an exception")
        kill_engine(daemon)
        answers = [stream.result() for stream in streams]
    assert all(answer is not None and answer.status_code == 200 for answer in answers)
    wait_until(lambda: restarts(daemon) == 2, what="a death")


def test_no_secret_is_ever_logged(daemon: Daemon) -> None:
    answers = [ask(daemon, path, body) for path, body in BODIES] + [ask(daemon, "/v1/completions", raw) for raw in RAW]
    statuses = Counter(answer.status_code for answer in answers if answer is not None)
    assert statuses[200] >= 8 and statuses[400] >= 10, statuses
    for header in ({"Authorization": f"Bearer {WRONG_KEY}"}, {"Authorization": f"Basic {WRONG_KEY}"}):
        refused = ask(daemon, "/v1/completions", {"prompt": CANARY}, **header)
        assert refused is not None and refused.status_code == 401
        assert not any(key in refused.text for key in (WRONG_KEY, KEY, ADMIN_KEY))
    # A path is no secret, so the log has it. It shows that the search below finds what is there.
    ask(daemon, "/v1/mark-of-the-path", b"{}")
    crash_under_load(daemon)
    for path in ("/metrics", "/state", "/openapi.json", "/config"):
        page = httpx.get(daemon.url + path, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=30)
        assert page.status_code == 200
        assert not any(secret in page.text for secret in (KEY, ADMIN_KEY, CANARY)), path
    assert daemon.stop(signal.SIGTERM) == 0
    assert hits(daemon, "mark-of-the-path") and hits(daemon, "told to fail"), "requests and crashes are in the log"
    assert hits(daemon, KEY, ADMIN_KEY, WRONG_KEY, CANARY, CANARY.lower()) == []
