"""Publishes KV events to subscribers over ZeroMQ, as vLLM's `ZmqEventPublisher` does.

Each replica has a PUB socket and, if asked for, a ROUTER socket that sends past batches again. Nothing here waits for
a subscriber: a socket drops what one does not read, and the gap in the sequence numbers tells it. The publisher lives
in the server process, so that numbers go on when an engine dies. Knows no index and no requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import NoReturn

import zmq
import zmq.asyncio
from msgspec import Raw

from inferd.engine.api.errors import ConfigError
from inferd.engine.api.wire.kv_events import CLEARED, encode_batch, with_rank

HIGH_WATER_MARK = 1000
"""Batches that wait for one subscriber, of up to 64 KiB each; further ones are dropped for it."""
MOST_KEPT = 10_000
"""Batches that are kept to be sent again, as many as vLLM keeps."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_SENT_AT_ONCE = 64
"""Batches sent again before other tasks of the event loop run (1 ms)."""
_MAX_REQUEST_BYTES = 1024
_LINGER_MS = 200
_HEARTBEAT_MS, _SILENCE_MS = 10_000, 30_000
"""A subscriber that is silent for so long is disconnected, which frees what waits for it."""


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """Endpoints and bounds of a publisher. Each replica adds its index to the ports."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_bytes: int = 64 * 2**20
    """Most bytes of batches that each replica keeps to send them again."""

    def of_rank(self, rank: int) -> PublisherOptions:
        """The options of one replica."""
        replay = None if self.replay_endpoint is None else with_rank(self.replay_endpoint, rank)
        return replace(self, endpoint=with_rank(self.endpoint, rank), replay_endpoint=replay)


def is_bound(endpoint: str) -> bool:
    """Whether subscribers connect to this endpoint. Otherwise the publisher connects to a subscriber there."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


class KVPublisher:
    """The sockets of all replicas. Create it on the event loop that serves replays."""

    def __init__(self, options: PublisherOptions, num_replicas: int) -> None:
        """Raises `ConfigError` if an endpoint cannot be used."""
        self._context = zmq.asyncio.Context()
        self._ranks: list[_Rank] = []
        try:
            for rank in range(num_replicas):
                self._ranks.append(_Rank(self._context, options.of_rank(rank), rank))
        except ConfigError:
            self.close()
            raise

    def publish(self, rank: int, events: Raw) -> None:
        """Send one batch of a replica's events; never waits."""
        self._ranks[rank].publish(events)

    async def serve_replays(self) -> None:
        """Answer requests for past batches until cancelled."""
        async with asyncio.TaskGroup() as group:
            for rank in self._ranks:
                if rank.replay is not None:
                    group.create_task(rank.serve_replays(rank.replay))

    def close(self) -> None:
        """Say that every cache is gone, and close the sockets. Waits at most a fifth of a second."""
        for rank in self._ranks:
            rank.publish(CLEARED)
        if any(rank.connects for rank in self._ranks):
            time.sleep(_LINGER_MS / 1000)
        for rank in self._ranks:
            rank.close()
        self._context.term()


class _Rank:
    """One replica's sockets, and the batches that it keeps."""

    def __init__(self, context: zmq.asyncio.Context, options: PublisherOptions, rank: int) -> None:
        self._rank, self._topic, self._buffer_bytes = rank, options.topic.encode(), options.buffer_bytes
        self._kept: deque[tuple[int, zmq.Frame]] = deque()
        """(sequence number, batch), oldest first. A frame's bytes are shared with the sockets that still send it."""
        self._num_bytes = 0
        # Microseconds since 1970: the numbers of a server that was started again are larger than all before.
        self._sequence = time.time_ns() // 1000
        self.connects = not is_bound(options.endpoint)
        self._pub = zmq.Socket(zmq.Context(context), zmq.PUB)
        self.replay: zmq.asyncio.Socket | None = None
        self._pub.set_hwm(HIGH_WATER_MARK)
        self._open(self._pub, options.endpoint, "--kv-events")
        if options.replay_endpoint is not None:
            self.replay = context.socket(zmq.ROUTER)
            self.replay.set_hwm(MOST_KEPT + 1)
            self._open(self.replay, options.replay_endpoint, "--kv-events-replay")
        self.publish(CLEARED)

    def _open(self, socket: zmq.SyncSocket | zmq.asyncio.Socket, endpoint: str, flag: str) -> None:
        socket.set(zmq.LINGER, _LINGER_MS)
        socket.set(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        if "::" in endpoint:
            socket.set(zmq.IPV6, 1)
        try:
            if is_bound(endpoint):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            example = "tcp://*:5557" if socket is self._pub else "tcp://*:5657"
            raise ConfigError(
                f"cannot publish KV events at {endpoint}: {error.strerror}; give {flag} another endpoint, such as "
                f"{example}"
            ) from error

    def publish(self, events: Raw) -> None:
        """Send a batch, keep it, and forget those beyond the bounds."""
        frame = zmq.Frame(encode_batch(time.time(), events, self._rank))
        # A PUB socket never lacks room: it drops what a subscriber has no room for.
        with contextlib.suppress(zmq.Again):
            self._pub.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), frame), zmq.NOBLOCK)
        if self.replay is not None:
            self._kept.append((self._sequence, frame))
            self._num_bytes += len(frame)
            while len(self._kept) > MOST_KEPT or self._num_bytes > self._buffer_bytes:
                self._num_bytes -= len(self._kept.popleft()[1])
        self._sequence += 1

    async def serve_replays(self, socket: zmq.asyncio.Socket) -> NoReturn:
        """Send kept batches from a requested sequence number on, one request after the other."""
        while True:
            request = await socket.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:
                continue  # it came from no subscriber of these events
            peer, first = request[0], int.from_bytes(request[2], "big")
            for number, (sequence, frame) in enumerate(list(self._kept)):
                if sequence >= first:
                    await socket.send_multipart((peer, b"", self._topic, sequence.to_bytes(8, "big"), frame))
                if number % _SENT_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await socket.send_multipart((peer, b"", b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        # libzmq aborts the process if such a socket is closed with messages left for a peer that does not speak ZeroMQ.
        self._pub.close(linger=0 if self.connects else None)
        if self.replay is not None:
            self.replay.close()
