"""Texts of 10 MB for every route that tokenizes. They are answered or refused in bounded memory, while others go on.

The engine process is real but its model is free, because the tests measure the server process.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import orjson
import pytest

from tests.e2e.conftest import Daemon, free_model, start
from tests.reliability.conftest import wait_until

__all__ = ["start"]

NUM_BYTES = 10_000_000
MIB = 2**20
MAX_GROWTH_MIB = 64
"""Maximum growth, which includes the body and its parsed text, 10 MB each."""
NUM_AT_ONCE = 16
WAIT_S = 120
Body = Mapping[str, object]

_random = random.Random(1)
_WORDS = [" the", " river", " 1234", "\n\n", "==", " \u00e9t\u00e9", "\u4eca\u5929\uff0c", "\U0001f600", " x1", "'s"]
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/"


def _repeated(unit: str) -> str:
    return unit * (NUM_BYTES // len(unit.encode()))


def _drawn(units: list[str] | str) -> str:
    return "".join(_random.choices(units, k=100_000)) * (NUM_BYTES // 800_000)


TEXTS: dict[str, Callable[[], str]] = {
    "digits": lambda: _repeated("1234567890"),
    "one letter": lambda: _repeated("a"),
    "spaces": lambda: _repeated(" "),
    "newlines": lambda: _repeated("\n")[: NUM_BYTES // 2],
    "emoji": lambda: _repeated("\U0001f600"),
    "one word of many letters": lambda: _repeated("".join(_random.choices(_LETTERS[:52], k=1_000))),
    "base64": lambda: _drawn(_LETTERS),
    "words": lambda: _drawn(_WORDS),
    "Latin-1": lambda: _drawn([chr(i) for i in range(32, 256)]),
    "special tokens": lambda: _repeated("<|im_start|>"),
    "spaces before special tokens": lambda: _repeated(" <|im_end|>"),
    "combining marks": lambda: _repeated("\u0301"),
}
SHORT = ("digits", "emoji")


def _chat(text: str) -> list[Body]:
    return [{"role": "user", "content": text}]


ROUTES: dict[str, tuple[str, Callable[[str], Body]]] = {
    "tokenize": ("/tokenize", lambda text: {"prompt": text}),
    "tokenize messages": ("/tokenize", lambda text: {"messages": _chat(text)}),
    "completion": ("/v1/completions", lambda text: {"prompt": text}),
    "many prompts": ("/v1/completions", lambda text: {"prompt": [text[: 2**15]] * 64, "max_tokens": 1}),
    "completion, truncated": ("/v1/completions", lambda text: {"prompt": text, "truncate_prompt_tokens": 9}),
    "render, truncated": ("/v1/completions/render", lambda text: {"prompt": text, "truncate_prompt_tokens": -1}),
    "chat": ("/v1/chat/completions", lambda text: {"messages": _chat(text)}),
    "chat, truncated": (
        "/v1/chat/completions", lambda text: {"messages": _chat(text), "truncate_prompt_tokens": 9, "max_tokens": 1}
    ),
    "count": ("/v1/messages/count_tokens", lambda text: {"messages": _chat(text)}),
    "messages": ("/v1/messages", lambda text: {"messages": _chat(text), "max_tokens": 1}),
    "response": ("/v1/responses", lambda text: {"input": text}),
}  # fmt: skip


def post(url: str, route: str, text: str) -> tuple[int, str]:
    """(status, error code). The client itself keeps no copy of the text."""
    path, body = ROUTES[route]
    content = orjson.dumps(body(text))
    answer = httpx.post(url + path, content=content, headers={"content-type": "application/json"}, timeout=WAIT_S)
    return answer.status_code, "" if answer.status_code == 200 else str(answer.json().get("error", {}).get("code"))


class Memory:
    """Memory of a process in MiB."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        self.before = self._of("VmRSS")
        (self._folder / "clear_refs").write_text("5")  # the highest is counted anew

    def _of(self, name: str) -> float:
        lines = (self._folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

    @property
    def growth(self) -> float:
        return self._of("VmRSS") - self.before

    @property
    def peak_growth(self) -> float:
        return self._of("VmHWM") - self.before


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    served = Daemon(program=free_model(1.0), may_fork=False)
    served.wait_ready()
    yield served
    served.stop()


@pytest.mark.parametrize("route", ROUTES)
def test_a_text_of_10_mb_takes_bounded_memory(daemon: Daemon, route: str, is_long: bool) -> None:
    for name in TEXTS if is_long else SHORT:
        text = TEXTS[name]()
        memory = Memory(daemon.process.pid)
        status, code = post(daemon.url, route, text)
        assert status in (200, 400), (route, name, status, code)
        assert memory.peak_growth < MAX_GROWTH_MIB, (route, name, memory.peak_growth, status, code)


def test_the_memory_is_given_back(daemon: Daemon) -> None:
    """Sends all texts once more."""
    memory = Memory(daemon.process.pid)
    for route in ("tokenize", "chat, truncated", "count"):
        for name in SHORT:
            post(daemon.url, route, TEXTS[name]())
    wait_until(lambda: memory.growth < MAX_GROWTH_MIB / 2, 60, "the memory is back")


@contextmanager
def limited(num_bytes: int) -> Iterator[Path]:
    """A control group that limits the memory of its processes. Skips the test if none can be made."""
    for top, limit in (("memory", "memory.limit_in_bytes"), ("unified", "memory.max"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", top, f"inferd-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(num_bytes))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group
        finally:
            group.rmdir()
        return
    pytest.skip("needs a memory control group that can be written")


@pytest.mark.long
def test_a_server_of_2_gib_survives_all_of_them_at_once(start: Callable[..., Daemon]) -> None:
    """An answer that streams meanwhile is complete."""
    rng = random.Random(2)
    asks = [(route, name) for route in ROUTES for name in TEXTS]
    rng.shuffle(asks)
    with limited(2 * 2**30) as group:
        enter = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group))
        daemon = start(program=(*enter, *free_model(20.0)))
        daemon.wait_ready()
        body = {"prompt": [300], "max_tokens": 1_000, "ignore_eos": True}
        with ThreadPoolExecutor(NUM_AT_ONCE + 1) as threads:
            beside = threads.submit(httpx.post, daemon.url + "/v1/completions", json=body, timeout=600)
            answers = list(threads.map(lambda ask: (*ask, *post(daemon.url, ask[0], TEXTS[ask[1]]())), asks))
            assert beside.result().json()["usage"]["completion_tokens"] == 1_000
        assert not [answer for answer in answers if answer[2] not in (200, 400, 429, 503)]
        assert daemon.process.poll() is None
        assert daemon.stop() == 0
