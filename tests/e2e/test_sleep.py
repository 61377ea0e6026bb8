"""A real daemon that sleeps: its engines end, their KV stays or goes, and answers are the same when it wakes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferd.engine.api.process.memory_file import POOL_MEMORY

from .conftest import Daemon, children, free_model, is_engine

ADMIN = {"Authorization": "Bearer boss"}
ASK = {
    "prompt": [300 + number % 97 for number in range(400)], "max_tokens": 24, "temperature": 1.0, "seed": 5,
    "ignore_eos": True, "return_token_ids": True,
}  # fmt: skip
LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 1.0, "seed": 3, "ignore_eos": True}
WAIT_S = 60.0
CLIENT = httpx.Client(timeout=WAIT_S)
"""Made once, because making one takes as long as a stream of the embedded model."""


def post(daemon: Daemon, path: str) -> httpx.Response:
    return CLIENT.post(daemon.url + path, headers=ADMIN)


def ask(daemon: Daemon, **fields: Any) -> httpx.Response:
    return CLIENT.post(f"{daemon.url}/v1/completions", json={**ASK, **fields})


def answered(daemon: Daemon) -> tuple[list[int], int]:
    """(token ids of an answer, prompt tokens that were cached)."""
    answer = ask(daemon).json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def engines(daemon: Daemon) -> list[int]:
    return [pid for pid, command in children(daemon.process.pid).items() if is_engine(command)]


def pool_bytes(daemon: Daemon) -> list[int]:
    """Memory of each KV pool that the server holds."""
    folder = f"/proc/{daemon.process.pid}/fd"
    links = [f"{folder}/{name}" for name in os.listdir(folder)]
    pools = [link for link in links if os.readlink(link).startswith(f"/memfd:{POOL_MEMORY}")]
    return [os.stat(pool).st_blocks * 512 for pool in pools]


class Stream:
    """A stream that a thread reads."""

    def __init__(self, daemon: Daemon, **fields: Any) -> None:
        self._daemon, self._fields = daemon, fields
        self.num_events = self.num_tokens = 0
        self.text, self.error = "", ""
        self.is_left = False
        """Whether the reader goes at the next line."""

    def read(self) -> None:
        url, body = (
            f"{self._daemon.url}/v1/completions",
            {**LONG, **self._fields, "stream": True, "stream_options": {"include_usage": True}},
        )
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as response:
            for line in response.iter_lines():
                if self.is_left:
                    return
                if not line.startswith("data: {"):
                    continue
                data = json.loads(line.removeprefix("data: "))
                self.error = data.get("error", {}).get("message", "")
                self.text += "".join(choice["text"] for choice in data.get("choices", ()))
                self.num_tokens = (data.get("usage") or {}).get("completion_tokens", 0)
                self.num_events += 1


@contextmanager
def streaming(stream: Stream) -> Iterator[Future[None]]:
    """A stream that has begun."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream.read)
        wait_until(lambda: stream.num_events > 3 or reading.done())
        try:
            assert not reading.done()
            yield reading
            reading.result(WAIT_S)
        finally:
            stream.is_left = True


def wait_until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_the_prefix_survives_level_1_and_not_level_2(start: Callable[..., Daemon]) -> None:
    daemon = start("--admin-key", "boss", "--kv-memory", "32MiB")
    expected, _ = answered(daemon)
    assert httpx.post(f"{daemon.url}/sleep", timeout=WAIT_S).status_code == 401 and engines(daemon)
    assert post(daemon, "/sleep").status_code == 200
    assert engines(daemon) == []
    (kept,) = pool_bytes(daemon)
    assert kept > 2**20
    refused = ask(daemon)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_is_asleep")
    for path, status in (("/health", 503), ("/live", 200), ("/v1/models", 200), ("/state", 200)):
        assert daemon.get(path).status_code == status, path
    assert httpx.post(f"{daemon.url}/tokenize", json={"prompt": "hi"}, timeout=WAIT_S).status_code == 200
    assert daemon.get("/is_sleeping").json() == {"is_sleeping": True}
    assert engines(daemon) == [], "none of these has woken it"
    assert post(daemon, "/wake_up").status_code == 200
    tokens, num_cached = answered(daemon)
    assert tokens == expected and num_cached >= len(ASK["prompt"]) - 2 * 16  # type: ignore[arg-type]
    assert post(daemon, "/sleep?level=2").status_code == 200
    assert (engines(daemon), pool_bytes(daemon)) == ([], [])
    assert post(daemon, "/v1/models/tiny/load").status_code == 200, "wakes too"
    assert answered(daemon) == (expected, 0)
    assert daemon.get("/state").json()["restarts"] == 0
    post(daemon, "/sleep?level=1")
    post(daemon, "/sleep?level=2")
    assert pool_bytes(daemon) == [], "it sleeps deeper"
    assert daemon.stop() == 0, "it stops as usual"
    assert "tiny: asleep at level 1; POST /wake_up wakes it" in daemon.output


def test_the_kv_directory_has_the_prefix_also_after_level_2(start: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start("--admin-key", "boss", "--kv-memory", "32MiB", "--kv-dir", str(tmp_path / "kv"))
    expected, _ = answered(daemon)
    post(daemon, "/sleep?level=2")
    post(daemon, "/wake_up")
    tokens, num_cached = answered(daemon)
    assert tokens == expected and num_cached > 0


@pytest.mark.parametrize("level", [1, 2])
def test_a_kept_stream_goes_on_with_the_same_text(start: Callable[..., Daemon], level: int) -> None:
    daemon = start("--admin-key", "boss", "--kv-memory", "32MiB")
    kept, whole = Stream(daemon), Stream(daemon)
    with streaming(kept) as reading:
        assert post(daemon, f"/sleep?mode=keep&level={level}").status_code == 200
        assert engines(daemon) == [] and not reading.done()
        assert ask(daemon).status_code == 503
        assert post(daemon, "/wake_up").status_code == 200
    whole.read()
    assert (kept.text, kept.error) == (whole.text, "") and kept.text


def test_streams_are_aborted_or_finished_first(start: Callable[..., Daemon]) -> None:
    daemon = start("--admin-key", "boss", program=free_model(20))
    aborted = Stream(daemon, max_tokens=2000)
    with streaming(aborted):
        assert post(daemon, "/sleep").status_code == 200
    assert "its model was put to sleep" in aborted.error and engines(daemon) == []
    post(daemon, "/wake_up")
    whole = Stream(daemon, max_tokens=100)
    with streaming(whole) as reading:
        assert post(daemon, "/sleep?mode=wait").status_code == 200
        reading.result(1)
    assert whole.num_tokens == 100 and not whole.error and engines(daemon) == []


def test_level_0_refuses_requests_and_keeps_the_engine(start: Callable[..., Daemon]) -> None:
    daemon = start("--admin-key", "boss", "--idle-unload", "1s", program=free_model(1))
    post(daemon, "/sleep?level=0&mode=wait")
    before = engines(daemon)
    assert ask(daemon).status_code == 503 and daemon.get("/is_sleeping").json() == {"is_sleeping": True}
    time.sleep(2.0)  # longer than an idle model stays loaded
    assert engines(daemon) == before and daemon.get("/state").json()["status"] == "paused"
    assert post(daemon, "/wake_up").status_code == 200 and ask(daemon).status_code == 200


def test_an_engine_that_is_killed_on_the_way_to_sleep(start: Callable[..., Daemon]) -> None:
    """The stream that is waited for goes on in the next engine, which then ends too."""
    daemon = start("--admin-key", "boss", program=free_model(20))
    stream = Stream(daemon, max_tokens=100)
    with streaming(stream), ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(post, daemon, "/sleep?mode=wait")
        wait_until(lambda: daemon.get("/is_sleeping").json()["is_sleeping"])
        os.kill(daemon.engine_pid, signal.SIGKILL)
        assert sleeping.result(WAIT_S).status_code == 200
    assert stream.num_tokens == 100 and not stream.error
    assert engines(daemon) == [] and daemon.get("/state").json()["restarts"] == 1


def test_all_replicas_and_standbys_sleep_and_wake(start: Callable[..., Daemon]) -> None:
    daemon = start("--admin-key", "boss", "--replicas", "2", "--standby", program=free_model(1))
    wait_until(lambda: len(engines(daemon)) == 4)
    assert post(daemon, "/sleep").status_code == 200
    assert engines(daemon) == []
    assert post(daemon, "/wake_up").status_code == 200
    assert [replica["status"] for replica in daemon.get("/state").json()["replicas"]] == ["up", "up"]
    wait_until(lambda: len(engines(daemon)) == 4)


def test_a_server_that_stops_holds_no_stream_for_a_model_that_is_asleep(start: Callable[..., Daemon]) -> None:
    daemon = start("--admin-key", "boss", program=free_model(20))
    held = Stream(daemon, max_tokens=2000)
    with streaming(held):
        post(daemon, "/sleep?mode=keep")
        began_s = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began_s < 15.0, "accepted answers have 30 s"
    assert "the server is shutting down" in held.error
