"""Publishes KV events to subscribers of ZeroMQ, as vLLM's `ZmqEventPublisher` does.

Each replica has a PUB port and, if asked for, a ROUTER port that sends past batches again. Nothing here waits for a
subscriber: a port drops what one does not read, and the gap in the sequence numbers tells it. The publisher lives in
the server process, so that numbers go on when an engine dies. Knows no index and no requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, replace

from msgspec import Raw

from inferd.engine.api.errors import ConfigError
from inferd.engine.api.wire.kv_events import CLEARED, encode_batch, with_rank
from inferd.engine.api.wire.zmtp import PeerError, head, message
from inferd.engine.api.wire.zmtp_port import Peer, Port

MOST_KEPT = 10_000
"""Batches that are kept to be sent again, as many as vLLM keeps."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

_SENT_AT_ONCE = 64
"""Batches sent again before other tasks of the event loop run (1 ms)."""
_MOST_REQUESTS = 16
"""Requests of one peer that wait for their replay."""


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


class KVPublisher:
    """The ports of all replicas."""

    def __init__(self, options: PublisherOptions, num_replicas: int) -> None:
        """Binds the ports. Raises `ConfigError` if an endpoint cannot be used."""
        self._ranks: list[_Rank] = []
        try:
            for rank in range(num_replicas):
                self._ranks.append(_Rank(options.of_rank(rank), rank))
        except ConfigError:
            for each in self._ranks:
                each.release()
            raise

    @property
    def ports(self) -> list[Port]:
        """All ports, those of each replica together."""
        return [port for rank in self._ranks for port in rank.ports]

    def publish(self, rank: int, events: Raw) -> None:
        """Send one batch of a replica's events; never waits."""
        self._ranks[rank].publish(events)

    async def serve(self) -> None:
        """Serve subscribers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for port in self.ports:
                group.create_task(port.serve())

    async def close(self) -> None:
        """Say that every cache is gone, and close the ports. Waits at most a fifth of a second."""
        for rank in self._ranks:
            rank.publish(CLEARED)
        await asyncio.gather(*(port.close() for port in self.ports))


class _Rank:
    """One replica's ports, and the batches that it keeps."""

    def __init__(self, options: PublisherOptions, rank: int) -> None:
        self._rank, self._topic = rank, options.topic.encode()
        has_replays = options.replay_endpoint is not None
        # Microseconds since 1970: the numbers of a server that was started again are larger than all before.
        self._kept = _Kept(options.buffer_bytes if has_replays else 0, time.time_ns() // 1000)
        self.ports: list[Port] = []
        self._publications = _Publications(options.endpoint, self._topic)
        self._bind(self._publications, "--kv-events", "tcp://*:5557")
        if options.replay_endpoint is not None:
            replays = _Replays(options.replay_endpoint, self._topic, self._kept)
            self._bind(replays, "--kv-events-replay", "tcp://*:5657")
        self.publish(CLEARED)

    def _bind(self, port: Port, flag: str, example: str) -> None:
        try:
            port.bind()
        except OSError as error:
            self.release()
            raise ConfigError(
                f"cannot publish KV events at {port.endpoint}: {error.strerror or error}; give {flag} another "
                f"endpoint, such as {example}"
            ) from error
        self.ports.append(port)

    def publish(self, events: Raw) -> None:
        """Send a batch, and keep it."""
        batch = encode_batch(time.time(), events, self._rank)
        self._publications.publish(self._kept.next, batch)
        self._kept.add(batch)

    def release(self) -> None:
        """Let others bind the endpoints."""
        for port in self.ports:
            port.release()


class _Kept:
    """The newest batches, whose sequence numbers follow one another."""

    def __init__(self, most_bytes: int, first: int) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._batches: deque[bytes] = deque()
        self.next = first
        """Sequence number of the next batch."""

    def add(self, batch: bytes) -> None:
        """Keep a batch, and forget those beyond the bounds."""
        self._batches.append(batch)
        self._num_bytes += len(batch)
        self.next += 1
        while len(self._batches) > MOST_KEPT or self._num_bytes > self._most_bytes:
            self._num_bytes -= len(self._batches.popleft())

    def at(self, sequence: int) -> tuple[int, bytes] | None:
        """The first kept batch with that number or a later one, and its number."""
        oldest = self.next - len(self._batches)
        found = max(sequence, oldest)
        return (found, self._batches[found - oldest]) if found < self.next else None


class _Publications(Port):
    """A PUB port. All batches have one topic, so it keeps the beginnings of that topic alone of what a peer subscribes
    to."""

    socket_type, peer_types = b"PUB", frozenset((b"SUB", b"XSUB"))

    def __init__(self, endpoint: str, topic: bytes) -> None:
        super().__init__(endpoint)
        self._topic = topic
        self._subscriptions: dict[Peer, set[bytes]] = {}
        """Beginnings of the topic by the peers that have subscribed to some."""

    def publish(self, sequence: int, batch: bytes) -> None:
        before = _framed(self._topic) + _framed(sequence.to_bytes(8, "big")) + head(len(batch), more=False)
        for peer in list(self._subscriptions):
            peer.send(before, batch)

    def on_command(self, peer: Peer, name: bytes, content: bytes) -> None:
        if name in (b"SUBSCRIBE", b"CANCEL"):
            self._subscribe(peer, content, is_wanted=name == b"SUBSCRIBE")

    def on_message(self, peer: Peer, parts: tuple[bytes, ...]) -> None:
        """Before ZMTP 3.1, a subscription is a message that begins with 1, and its end one that begins with 0."""
        if len(parts) == 1 and parts[0][:1] in (b"\0", b"\1"):
            self._subscribe(peer, parts[0][1:], is_wanted=parts[0][0] == 1)

    def on_lost(self, peer: Peer) -> None:
        self._subscriptions.pop(peer, None)

    def _subscribe(self, peer: Peer, beginning: bytes, *, is_wanted: bool) -> None:
        if not self._topic.startswith(beginning):
            return
        subscribed = self._subscriptions.setdefault(peer, set())
        if is_wanted:
            subscribed.add(beginning)
        else:
            subscribed.discard(beginning)
        if not subscribed:
            del self._subscriptions[peer]


class _Replays(Port):
    """A ROUTER port. A request is an envelope and a sequence number, and the answer all kept batches from that one
    on."""

    socket_type, peer_types = b"ROUTER", frozenset((b"DEALER", b"REQ", b"ROUTER"))

    def __init__(self, endpoint: str, topic: bytes, kept: _Kept) -> None:
        super().__init__(endpoint)
        self._topic, self._kept = topic, kept
        self._wanted: dict[Peer, deque[int]] = {}
        """First sequence numbers of the replays that each peer waits for. The first one runs."""
        self._tasks: dict[Peer, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        """Held by the replay that sends."""

    def on_message(self, peer: Peer, parts: tuple[bytes, ...]) -> None:
        if len(parts) != 2 or len(parts[1]) != 8:
            return  # it came from no subscriber of these events
        wanted = self._wanted.setdefault(peer, deque())
        if len(wanted) >= _MOST_REQUESTS:
            raise PeerError(f"it asked for more than {_MOST_REQUESTS} replays before it had read the first")
        wanted.append(int.from_bytes(parts[1], "big"))
        if peer not in self._tasks:
            self._tasks[peer] = asyncio.create_task(self._replay(peer, wanted))

    def on_command(self, peer: Peer, name: bytes, content: bytes) -> None:
        """A ROUTER knows no commands of its own."""

    def on_lost(self, peer: Peer) -> None:
        self._wanted.pop(peer, None)
        task = self._tasks.pop(peer, None)
        if task is not None:
            task.cancel()

    async def _replay(self, peer: Peer, wanted: deque[int]) -> None:
        """Send what a peer waits for, as fast as it reads. Batches that are forgotten meanwhile are left out."""
        while wanted:
            at, end = wanted[0], self._kept.next
            while at < end:
                await peer.room.wait()
                async with self._turn:
                    at = self._send_some(peer, at, end)
                    await asyncio.sleep(0)
            peer.send(message(b"", b"", END_OF_REPLAY, b""))
            wanted.popleft()
        del self._tasks[peer]

    def _send_some(self, peer: Peer, at: int, end: int) -> int:
        """Send batches from a sequence number on; returns the first number that is left."""
        for _ in range(_SENT_AT_ONCE):
            found = self._kept.at(at)
            if found is None or found[0] >= end or not peer.room.is_set():
                return end if found is None else found[0]
            at, batch = found
            before = _framed(b"") + _framed(self._topic) + _framed(at.to_bytes(8, "big"))
            peer.send(before + head(len(batch), more=False), batch)
            at += 1
        return at


def _framed(part: bytes) -> bytes:
    """A part that others follow."""
    return head(len(part), more=True) + part
