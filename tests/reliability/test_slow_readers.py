"""R12: clients that hardly read their streams: generation does not wait for them, memory does not grow with them, and
others notice nothing."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import cycle, pairwise
from statistics import median
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.e2e.conftest import Daemon
from tests.reliability.asking import Answer, Asker
from tests.reliability.conftest import WITHOUT_CACHE, wait_until
from tests.reliability.test_disconnects import finished
from tests.reliability.workloads import streams

SHORT_READERS, LONG_READERS = 24, 1_000
MAX_RSS_GROWTH = 100 * 2**20
RECEIVE_BYTES = 4_096
"""Of a slow reader's kernel buffer: what it does not read, the server holds."""
TOKENS = 250
PARTS = 20
"""Of a second, in which as many clients each read their byte: a burst of reads would be the test's own doing."""
ROUNDS = 11
"""Of the long form's p99, each before, beside and after: one p99 is a matter of a few gaps."""
BODY = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "logprobs": 5}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    served = Daemon(WITHOUT_CACHE, "--no-access-log")
    served.wait_ready()
    yield served
    served.stop(signal.SIGKILL)


class SlowReaders(threading.Thread):
    """Streams that are asked for at once and read a byte a second each."""

    def __init__(self, daemon: Daemon, num_readers: int, held: ExitStack) -> None:
        super().__init__(daemon=True)
        address = urlsplit(daemon.url)
        raw = json.dumps(BODY).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        self._is_over = threading.Event()
        self._clients = []
        for _ in range(num_readers):
            client = held.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            client.settimeout(60)
            client.connect((address.hostname, address.port))
            client.sendall(head % len(raw) + raw)
            self._clients.append(client)
        held.callback(self.stop)

    def run(self) -> None:
        for part in cycle(range(PARTS)):
            if self._is_over.wait(1.0 / PARTS):
                return
            for client in self._clients[part::PARTS]:
                client.recv(1)

    def stop(self) -> None:
        self._is_over.set()
        self.join()

    def read_all(self) -> list[bytes]:
        """What is left of every stream, read by clients that have become quick."""
        self.stop()
        with ThreadPoolExecutor(64) as threads:
            return list(threads.map(lambda client: b"".join(iter(partial(client.recv, 65536), b"")), self._clients))


def itl_p99_ms(answers: list[Answer]) -> float:
    gaps = sorted(later - earlier for answer in answers for earlier, later in pairwise(answer.times_s))
    return gaps[int(len(gaps) * 0.99)] * 1e3


def test_r12_slow_readers_cost_little_and_others_nothing(daemon: Daemon, is_long: bool) -> None:
    num_readers = LONG_READERS if is_long else SHORT_READERS
    asker, asks = Asker(daemon.url), streams(4, 200)
    process = psutil.Process(daemon.process.pid)
    expected = asker.ask(asks)

    def pace() -> list[float]:
        """p99 of the time between two tokens, of each round."""
        rounds = [asker.ask(asks) for _ in range(ROUNDS if is_long else 1)]
        assert all([answer.said for answer in answers] == [answer.said for answer in expected] for answers in rounds)
        return [itl_p99_ms(answers) for answers in rounds]

    alone, before = pace(), process.memory_info().rss
    done = finished(daemon, "length")
    with ExitStack() as held:
        readers = SlowReaders(daemon, num_readers, held)
        readers.start()
        # Generation goes on at its own pace: every choice ends, though hardly a byte was read.
        wait_until(lambda: finished(daemon, "length") == done + num_readers, 240, "the slow readers' answers")
        state = httpx.get(daemon.url + "/state", timeout=30).json()
        assert (state["requests"], state["kv_cache"]["used"]) == ({"running": 0, "waiting": 0}, 0)
        beside, grown = pace(), process.memory_info().rss - before
        print(f"R12: {num_readers} readers at 1 B/s: RSS +{grown / 2**20:.1f} MiB")
        assert grown < MAX_RSS_GROWTH
        began = time.monotonic()
        answers = readers.read_all()
        assert all(answer.rstrip().endswith(b"data: [DONE]\n\n\r\n0") for answer in answers), "a stream was not whole"
        print(f"R12: all of it read {time.monotonic() - began:.1f} s later, nothing lost")
    for when, p99s in (("before", alone), ("beside them", beside), ("after", pace())):
        print(f"R12: p99 ITL {when}: {median(p99s):.2f} ms ({min(p99s):.2f} to {max(p99s):.2f})")
