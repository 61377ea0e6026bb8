"""A request that can never fit is refused at once with the limit, however long the queue is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Daemon

from .conftest import count, wait_until

LENGTH = 2_048
"""Context length of the embedded model in tokens."""
WORD = "word "

TOO_LONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": WORD * 3_000}),
    ("/v1/completions", {"prompt": [7] * LENGTH}),
    ("/v1/completions", {"prompt": [[7], [7] * (LENGTH + 1)]}),
    ("/v1/completions", {"prompt": [7] * LENGTH, "max_tokens": 2**31}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2**31, "min_tokens": LENGTH}),
    ("/v1/completions", {"prompt": WORD * 3_000, "max_tokens": 1, "stream": True}),
    ("/v1/completions", {"prompt": WORD * 60_000, "n": 128}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORD * 3_000}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORD * 3_000}], "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORD * 3_000}], "max_completion_tokens": 2**31}),
    ("/v1/messages", {"messages": [{"role": "user", "content": WORD * 3_000}], "max_tokens": 4}),
    ("/v1/responses", {"input": WORD * 3_000}),
    ("/v1/embeddings", {"input": WORD * 3_000}),
)


NUM_HELD = 8
"""Requests of the whole context, one after the other: 20 s of work, and more on a busy machine."""


@pytest.fixture
def full(start: Callable[..., Daemon]) -> Iterator[Daemon]:
    """A daemon that runs one request at a time, with a long queue."""
    daemon = start("--max-num-seqs", "1")
    body = {"prompt": "x", "max_tokens": LENGTH - 8, "ignore_eos": True}

    def hold(seed: int) -> None:
        with suppress(httpx.HTTPError):  # the daemon ends with the test, and these with it
            httpx.post(daemon.url + "/v1/completions", json={**body, "seed": seed}, timeout=120)

    threads = [threading.Thread(target=hold, args=(seed,)) for seed in range(NUM_HELD)]
    for thread in threads:
        thread.start()
    # On a busy machine some may have ended before the last arrives.
    wait_until(lambda: count(daemon, "inferd_requests_waiting") >= NUM_HELD / 2, what="a long queue")
    yield daemon
    daemon.stop(signal.SIGKILL)
    for thread in threads:
        thread.join()


def test_what_cannot_fit_is_told_the_limit_and_waits_behind_nobody(full: Daemon) -> None:
    with httpx.Client(base_url=full.url, timeout=60) as client:
        for path, body in TOO_LONG:
            answer = client.post(path, json=body)
            assert answer.status_code == 400, (path, answer.text[:300])
            message = answer.json()["error"]["message"]
            assert any(str(limit) in message for limit in (LENGTH, LENGTH - 1)), message
        assert count(full, "inferd_requests_waiting") >= 1, "the queue was worked off: nothing is shown"
        assert count(full, "inferd_requests_running") == 1
