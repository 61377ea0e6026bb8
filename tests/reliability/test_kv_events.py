"""Subscribers to KV events follow each replica's cache through the death of its engine and the end of the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from tests.e2e.conftest import Daemon, free_model
from tests.kv_subscriber import Held, Mirror
from tests.reliability.conftest import HTTP, engines, kill_engine, restarts, wait_until

PROMPT = list(range(300, 397))
"""Three blocks of 32 tokens, and one token more."""


class Gateway:
    """Reads one replica's events from its replay socket, and then follows its PUB socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: tuple[str, str]) -> None:
        self.mirror, self.rank = Mirror(), -1
        self._next = 0
        self._sub, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._sub.connect(endpoints[0])
        self._sub.subscribe(b"kv")
        replay.connect(endpoints[1])
        replay.send_multipart((b"", bytes(8)))
        while True:
            assert replay.poll(20_000), "no replay"
            _, _, sequence, batch = replay.recv_multipart()
            if not batch:
                break
            self._read(sequence, batch)
        replay.close()

    def _read(self, sequence: bytes, batch: bytes) -> None:
        number = int.from_bytes(sequence, "big")
        if number < self._next:
            return  # it was in the replay as well
        assert number == self._next or not self._next, "a gap"
        self._next = number + 1
        self.rank = self.mirror.read(batch).data_parallel_rank or 0

    def held(self) -> Held:
        """The blocks that the replica has, as far as its events have come."""
        while self._sub.poll(0):
            _, sequence, batch = self._sub.recv_multipart()
            self._read(sequence, batch)
        return self.mirror.held


@pytest.mark.sampled(keep=4, among="recoveries")
def test_events_go_on_after_an_engine_died(start: Callable[..., Daemon], tmp_path: Path) -> None:
    pub, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    events = ("--kv-events", pub, "--kv-events-replay", replay, "--kv-events-topic", "kv@tiny")
    daemon = start(*events, "--replicas", "2", "--block-size", "32", program=free_model(1))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateways = [Gateway(context, (pub, replay)), Gateway(context, (pub + "_dp1", replay + "_dp1"))]
    assert [gateway.rank for gateway in gateways] == [0, 1]
    blocks = {tuple(PROMPT[i : i + 32]) for i in (0, 32, 64)}

    def num_with(ids: set[tuple[int, ...]]) -> int:
        return sum(set(gateway.held().values()) == ids for gateway in gateways)

    def ask(**fields: object) -> None:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, **fields}
        HTTP.post(f"{daemon.url}/v1/completions", json=body).raise_for_status()

    ask(cache_salt="alice")
    ask()
    wait_until(lambda: num_with(blocks) == 1, what="the blocks of the request without a salt, and no others")
    assert num_with(set()) == 1
    for _ in engines(daemon):
        killed = restarts(daemon) + 1
        kill_engine(daemon)
        wait_until(lambda killed=killed: restarts(daemon) == killed)  # type: ignore[misc]
    wait_until(lambda: num_with(set()) == 2, what="both caches empty")
    ask()
    wait_until(lambda: num_with(blocks) == 1, what="the blocks again")
    daemon.stop()
    wait_until(lambda: num_with(set()) == 2, what="both caches gone")
    context.destroy(linger=0)
