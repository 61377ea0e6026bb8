"""Strangers at the ports of KV events: what they send costs no memory, they are dropped, and subscribers notice
nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

import httpx
import psutil
import zmq

from tests.e2e.conftest import Daemon, free_model, start
from tests.reliability.conftest import wait_until
from tests.zmtp_client import MORE, Client, command, frame

__all__ = ["start"]

MAX_GROWTH_BYTES = 32 * 2**20
NUM_SUBSCRIPTIONS = 20_000
NUM_MULTIPART_BYTES = 64 * 2**20
MOST_TAKEN_BYTES = 8 * 2**20
"""Most bytes that the system's buffers and the server take before the connection is closed."""
DROPPED = "dropped the connection of a process of this machine: it sent "


class Ports:
    """A server with KV events, and a subscriber that behaves."""

    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self.daemon, self.folder = daemon, folder
        self._process = psutil.Process(daemon.process.pid)
        self._numbers = count(1)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sub, self._replay = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._sub.connect(f"ipc://{folder}/pub")
        self._sub.subscribe(b"")
        self._replay.connect(f"ipc://{folder}/replay")
        while not self._sub.poll(200):
            self.ask()
        self._last = 0
        self.follow()
        self.idle_bytes = self._process.memory_info().rss

    def ask(self) -> None:
        """A request whose blocks have events."""
        body = {"model": "tiny", "prompt": [next(self._numbers), *range(300, 397)], "max_tokens": 1}
        httpx.post(f"{self.daemon.url}/v1/completions", json=body, timeout=60).raise_for_status()

    def follow(self) -> None:
        """The subscriber gets the events of a further request without a gap, and then a replay."""
        self.ask()
        assert self._sub.poll(20_000), "no event"
        while self._sub.poll(200):
            number = int.from_bytes(self._sub.recv_multipart()[1], "big")
            assert number == self._last + 1 or not self._last, "a gap"
            self._last = number
        self._replay.send_multipart((b"", self._last.to_bytes(8, "big")))
        found = []
        while not found or found[-1] != 2**64 - 1:
            assert self._replay.poll(20_000), "no replay"
            found.append(int.from_bytes(self._replay.recv_multipart()[2], "big"))
        assert found == [self._last, 2**64 - 1]

    def attacked(self, attack: Callable[[], tuple[Client, int]]) -> tuple[Client, int]:
        """The attack's result. Requests go on during it, because a PUB socket of libzmq reads its peers when it
        sends."""
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(attack)
            self.ask()
            while not running.done():
                self.ask()
        for _ in range(3):
            self.ask()
        return running.result()

    def growth_bytes(self) -> int:
        return self._process.memory_info().rss - self.idle_bytes

    def close(self) -> None:
        self._context.destroy(linger=0)


def subscribe(folder: Path) -> tuple[Client, int]:
    """Many long subscriptions: the client, and the bytes that the server took."""
    client = Client(folder / "pub", b"SUB")
    return client, client.flood([command(b"SUBSCRIBE", os.urandom(1000)) for _ in range(NUM_SUBSCRIPTIONS)], 1)


def send_parts(folder: Path) -> tuple[Client, int]:
    """A message without end: the client, and the bytes that the server took."""
    client, part = Client(folder / "replay", b"DEALER"), frame(bytes(1000), MORE)
    return client, client.flood([part], NUM_MULTIPART_BYTES // len(part))


def test_strangers_cost_no_memory(start: Callable[..., Daemon], tmp_path: Path) -> None:
    events = "--kv-events", f"ipc://{tmp_path}/pub", "--kv-events-replay", f"ipc://{tmp_path}/replay"
    ports = Ports(start(*events, program=free_model(1), may_fork=False), tmp_path)
    try:
        for attack in (subscribe, send_parts):
            client, num_bytes = ports.attacked(partial(attack, tmp_path))
            assert ports.growth_bytes() < MAX_GROWTH_BYTES
            assert client.rest() is not None, "it is still connected"
            assert num_bytes < MOST_TAKEN_BYTES
            ports.follow()
        # The first peer is named, and the next one is counted later.
        wait_until(lambda: DROPPED in ports.daemon.output, what="the log line")
    finally:
        ports.close()
