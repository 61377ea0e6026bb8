"""The ports of KV events: libzmq's own sockets get all they are due, and a peer that breaks a bound is dropped."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
import zmq
import zmq.asyncio

from inferd.engine.api.wire import zmtp_port
from inferd.engine.api.wire.kv_events import CLEARED, BlockRemoved, encode_events
from inferd.engine.api.wire.kv_publisher import END_OF_REPLAY, KVPublisher, PublisherOptions
from inferd.engine.api.wire.zmtp import GREETING, MAX_PARTS, PeerError, Reader, message
from inferd.engine.api.wire.zmtp_port import MAX_FULL_TICKS, MAX_PEERS, MAX_SILENT_TICKS, Port
from tests.zmtp_client import COMMAND, LONG, MORE, command, frame, ready
from tests.zmtp_client import GREETING as THEIRS


def read(data: bytes, cuts: list[int]) -> list[tuple[str, tuple[bytes, ...]]]:
    """All that a reader finds in `data`, which arrives in pieces."""
    reader, found = Reader(), []
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        found += [(received.kind, received.parts) for received in reader.feed(data[begin:end])]
    return found


def test_what_a_peer_sends_is_read_wherever_it_is_cut() -> None:
    chance = random.Random(0)
    bodies = [chance.randbytes(length) for length in (0, 1, 255, 256, 1024, 7)]
    data = THEIRS + ready(b"SUB") + command(b"PING", b"\0\0abc")
    data += b"".join(frame(body, MORE if i % 3 < 2 else 0) for i, body in enumerate(bodies))
    expected: list[tuple[str, tuple[bytes, ...]]] = [
        ("greeting", ()), ("command", (b"READY", b"\x0bSocket-Type\0\0\0\x03SUB")), ("command", (b"PING", b"\0\0abc")),
        ("message", tuple(bodies[:3])), ("message", tuple(bodies[3:])),
    ]  # fmt: skip
    assert data.endswith(message(*bodies[:3]) + message(*bodies[3:])) and data.startswith(GREETING)
    assert read(data, list(range(1, len(data)))) == expected
    for _ in range(100):
        assert read(data, sorted(chance.sample(range(1, len(data)), 6))) == expected


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak"),
        (b"\xff" + bytes(9), "does not speak"),
        (b"\xff" + bytes(8) + b"\x7f\x01", "speaks version 1 .*; ZeroMQ 4.0 or newer is needed"),
        (THEIRS.replace(b"NULL\0", b"CURVE"), "asks for the security mechanism b'CURVE', but there is only NULL"),
        (THEIRS + b"\x08\x00", "unknown flags 0x08"),
        (THEIRS + frame(bytes(1025)), "frame of 1025 bytes, but at most 1024"),
        (THEIRS + bytes((LONG,)) + b"\xff" * 8, "frame of 18446744073709551615 bytes"),
        (THEIRS + frame(b"", MORE) * (MAX_PARTS + 1), "more than 8 parts"),
        (THEIRS + frame(b"\x05PIN", COMMAND), "malformed command"),
        (THEIRS + frame(b"", COMMAND), "malformed command"),
        (THEIRS + frame(b"\x00PING", COMMAND), "malformed command"),
        (THEIRS + frame(b"\x04PING", COMMAND | MORE), "malformed command"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(PeerError, match=why):
        read(data, [])
    with pytest.raises(PeerError, match=why):
        read(data, list(range(1, len(data))))


class Ports:
    """A publisher at two socket files."""

    def __init__(self, publisher: KVPublisher, folder: Path) -> None:
        self.publisher, self.folder = publisher, folder
        self.events, self.replays = publisher.ports
        self.context = zmq.asyncio.Context()

    def connected(self, kind: int, name: str) -> zmq.asyncio.Socket:
        made = self.context.socket(kind)
        made.connect(f"ipc://{self.folder}/{name}")
        return made

    async def client(self, name: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.folder / name)
        writer.write(data)
        return reader, writer

    async def until(self, port: Port, num_peers: int) -> None:
        """Wait for so many peers that are not silent."""
        async with asyncio.timeout(20):
            while sum(not peer.num_silent_ticks for peer in port.peers) != num_peers:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def ended(self, reader: asyncio.StreamReader) -> bytes:
        """All that is sent until the connection is closed."""
        try:
            async with asyncio.timeout(20):
                return await reader.read()
        except ConnectionError:
            return b""


def run(folder: Path, use: Callable[[Ports], Awaitable[None]], *, buffer_bytes: int = 2**20) -> None:
    async def body() -> None:
        options = PublisherOptions(f"ipc://{folder}/pub", f"ipc://{folder}/replay", "kv@tiny", buffer_bytes)
        publisher = KVPublisher(options, 1)
        serving, ports = asyncio.create_task(publisher.serve()), Ports(publisher, folder)
        try:
            await use(ports)
        finally:
            serving.cancel()
            await asyncio.wait((serving,))
            await publisher.close()
            ports.context.destroy(linger=0)

    uvloop.run(body())
    assert not list(folder.iterdir()), "a socket's file is left"


def test_topics_are_those_of_the_subscriptions_that_last(tmp_path: Path) -> None:
    async def use(ports: Ports) -> None:
        subscribers = {begin: ports.connected(zmq.SUB, "pub") for begin in (b"", b"kv", b"kv@tiny", b"kv@tin y", b"x")}
        for begin, subscriber in subscribers.items():
            subscriber.subscribe(begin)
            subscriber.subscribe(b"other")
        old, writer = await ports.client("pub", THEIRS + ready(b"SUB") + frame(b"\1kv") + frame(b"\1kv@") * 2)
        await ports.until(ports.events, 6)
        due = [subscribers[begin] for begin in (b"", b"kv", b"kv@tiny")]
        for subscriber in due:
            while not await subscriber.poll(5):
                ports.publisher.publish(0, CLEARED)
        assert not await subscribers[b"x"].poll(0) and not await subscribers[b"kv@tin y"].poll(0)
        async with asyncio.timeout(20):
            await old.readuntil(frame(b"kv@tiny", MORE))
        # Subscriptions are idempotent: one cancellation ends a subscription that was made twice.
        writer.write(frame(b"\0kv@") + frame(b"\0kv") + command(b"PING", b"\0\0here"))
        async with asyncio.timeout(20):
            await old.readuntil(command(b"PONG", b"here"))
        ports.publisher.publish(0, CLEARED)
        writer.write(command(b"PING", b"\0\0again"))
        async with asyncio.timeout(20):
            assert b"kv@tiny" not in await old.readuntil(command(b"PONG", b"again"))
        writer.close()

    run(tmp_path, use)


def test_any_socket_that_asks_gets_a_replay(tmp_path: Path) -> None:
    async def use(ports: Ports) -> None:
        req, dealer = ports.connected(zmq.REQ, "replay"), ports.connected(zmq.DEALER, "replay")
        await req.send(bytes(8))
        await dealer.send_multipart((b"", bytes(8)))
        async with asyncio.timeout(20):
            topic, _, batch = await req.recv_multipart()
            assert (topic, (await dealer.recv_multipart())[3]) == (b"kv@tiny", batch)
            assert await dealer.recv_multipart() == [b"", b"", END_OF_REPLAY, b""]

    run(tmp_path, use)


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("pub", ready(b"PULL"), "has a socket of type b'PULL', but only SUB or XSUB can be served here"),
        ("replay", ready(b"SUB"), "but only DEALER or REQ or ROUTER can be served here"),
        ("pub", command(b"READY", b"\xffSocket"), "malformed READY"),
        ("pub", command(b"READY", b"\x01a\xff\xff\xff\xff"), "malformed READY"),
        ("pub", frame(b"\1"), "a message before it was ready"),
        ("pub", command(b"SUBSCRIBE"), "a command before it was ready"),
        ("pub", ready(b"SUB") + frame(b"\0") * 8192, "more than 16384 bytes within 10 s"),
        ("replay", ready(b"DEALER") + (frame(b"", MORE) + frame(bytes(8))) * 17, "more than 16 replays before"),
    ],
)
def test_a_peer_that_breaks_a_bound_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, data: bytes, why: str
) -> None:
    async def use(ports: Ports) -> None:
        port = ports.events if name == "pub" else ports.replays
        reader, writer = await ports.client(name, THEIRS + data)
        await ports.ended(reader)
        await ports.until(port, 0)
        writer.close()

    with caplog.at_level(logging.WARNING):
        run(tmp_path, use)
    assert why in caplog.text


def test_silent_peers_are_dropped_and_libzmq_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def use(ports: Ports) -> None:
        subscriber = ports.connected(zmq.SUB, "pub")
        subscriber.subscribe(b"")
        half, half_writer = await ports.client("pub", THEIRS)
        dumb, dumb_writer = await ports.client("pub", THEIRS + ready(b"SUB"))
        await ports.until(ports.events, 3)
        while not await subscriber.poll(5):
            ports.publisher.publish(0, CLEARED)
        for num_ticks in range(1, MAX_SILENT_TICKS + 2):
            ports.events.tick()
            if num_ticks == 2:
                assert await ports.ended(half)
            await ports.until(ports.events, 1)  # libzmq has answered
        assert (await ports.ended(dumb)).count(command(b"PING", bytes(2))) == MAX_SILENT_TICKS
        await ports.until(ports.events, 1)
        half_writer.close()
        dumb_writer.close()

    with caplog.at_level(logging.WARNING):
        run(tmp_path, use)
    assert "did not end ZeroMQ's handshake" in caplog.text


def test_a_peer_that_sends_but_does_not_read_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While nothing waits for a peer it may read nothing, and one that reads stays."""
    events = next(encode_events([BlockRemoved([1 << 63] * 6000, "CPU", 0)]))

    async def use(ports: Ports) -> None:
        subscriber = ports.connected(zmq.SUB, "pub")
        subscriber.subscribe(b"")
        await ports.until(ports.events, 1)
        (reads,) = ports.events.peers
        _, stalled = await ports.client("pub", THEIRS + ready(b"SUB") + command(b"SUBSCRIBE"))
        await ports.until(ports.events, 2)
        (stalls,) = ports.events.peers - {reads}
        stalled.transport.pause_reading()  # type: ignore[attr-defined]
        while not await subscriber.poll(5):
            ports.publisher.publish(0, CLEARED)
        for num_ticks in range(2 * MAX_FULL_TICKS + 1):
            while num_ticks == MAX_FULL_TICKS and stalls.num_waiting_bytes < 3 * len(events):
                ports.publisher.publish(0, events)
                await subscriber.recv_multipart()
            assert stalls in ports.events.peers
            ports.events.tick()
            assert reads in ports.events.peers
            stalled.write(command(b"PONG"))
            await ports.until(ports.events, 2 if num_ticks < 2 * MAX_FULL_TICKS else 1)
        await asyncio.wait_for(stalls.lost.wait(), 20)
        assert ports.events.num_waiting_bytes == reads.num_waiting_bytes
        stalled.transport.abort()

    with caplog.at_level(logging.WARNING):
        run(tmp_path, use)
    assert "it read too little for 30 s, while messages waited for it" in caplog.text


def test_all_batches_that_wait_have_one_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer for which most wait goes, and the others lose nothing."""
    events = next(encode_events([BlockRemoved([1 << 63] * 6000, "CPU", 0)]))
    most = 40 * len(events)
    monkeypatch.setattr(zmtp_port, "MAX_WAITING_BYTES", most)

    async def use(ports: Ports) -> None:
        peers, writers = [], []
        for number in range(1, 4):
            _, writer = await ports.client("pub", THEIRS + ready(b"SUB") + command(b"SUBSCRIBE"))
            writers.append(writer)
            await ports.until(ports.events, number)
            peers += ports.events.peers - set(peers)
            while peers[-1].num_waiting_bytes < 3 * len(events):  # so fewer wait for each one that comes later
                ports.publisher.publish(0, events)
                await asyncio.sleep(0)
        while len(ports.events.peers) == 3:
            ports.publisher.publish(0, events)
            assert ports.events.num_waiting_bytes == sum(peer.num_waiting_bytes for peer in peers) <= most
            await asyncio.sleep(0)
        assert ports.events.peers == set(peers[1:]) and peers[0].num_waiting_bytes == 0
        assert peers[1].num_waiting_bytes > peers[2].num_waiting_bytes > 0
        for writer in writers:
            writer.transport.abort()
        await ports.until(ports.events, 0)
        assert ports.events.num_waiting_bytes == 0

    with caplog.at_level(logging.WARNING):
        run(tmp_path, use)
    assert f"more than {most} bytes waited for all connections" in caplog.text


def test_connections_are_bounded_and_places_are_free_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def use(ports: Ports) -> None:
        subscriber = ports.connected(zmq.SUB, "pub")
        subscriber.subscribe(b"")
        await ports.until(ports.events, 1)
        many = [await ports.client("pub", b"") for _ in range(MAX_PEERS - 1)]
        await ports.until(ports.events, MAX_PEERS)
        for _ in range(3):
            reader, writer = await ports.client("pub", b"")
            assert await ports.ended(reader) == b""
            writer.close()
        while not await subscriber.poll(5):
            ports.publisher.publish(0, CLEARED)
        for _, writer in many:
            writer.close()
        await ports.until(ports.events, 1)
        ports.events.tick()

    with caplog.at_level(logging.WARNING):
        run(tmp_path, use)
    assert f"there are {MAX_PEERS} connections already" in caplog.text
    assert caplog.text.count("dropped the connection of a process of this machine") == 1
    assert "dropped 2 more connections" in caplog.text


def test_a_replay_waits_for_a_slow_reader_and_leaves_out_what_is_forgotten(tmp_path: Path) -> None:
    events = next(encode_events([BlockRemoved([1 << 63] * 3000, "CPU", 0)]))

    async def use(ports: Ports) -> None:
        num_kept = 2 * 2**20 // len(events)
        for _ in range(num_kept):
            ports.publisher.publish(0, events)
        slow, writer = await ports.client("replay", THEIRS + ready(b"DEALER") + frame(b"", MORE) + frame(bytes(8)))
        async with asyncio.timeout(20):
            await slow.readuntil(frame(b"", MORE) + frame(b"kv@tiny", MORE))
        other = ports.connected(zmq.DEALER, "replay")
        await other.send_multipart((b"", bytes(8)))
        async with asyncio.timeout(20):
            while (await other.recv_multipart())[2] != END_OF_REPLAY:
                pass
        for _ in range(2 * num_kept):
            ports.publisher.publish(0, events)
        rest = b""
        async with asyncio.timeout(20):
            while not rest.endswith(frame(END_OF_REPLAY, MORE) + frame(b"")):
                rest += await slow.read(65536)
        # The first one's topic was read before, and the system's buffers held a part of the others.
        assert 3 <= rest.count(bytes(events)) < num_kept
        writer.close()

    run(tmp_path, use, buffer_bytes=2 * 2**20)


def test_the_publisher_connects_to_a_subscriber_again_and_again() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        publisher = KVPublisher(PublisherOptions(endpoint), 1)
        serving = asyncio.create_task(publisher.serve())
        for _ in range(2):
            context = zmq.asyncio.Context()
            try:
                subscriber = context.socket(zmq.SUB)
                subscriber.bind(endpoint)
                subscriber.subscribe(b"")
                async with asyncio.timeout(20):
                    while not await subscriber.poll(20):
                        publisher.publish(0, CLEARED)
            finally:
                context.destroy(linger=0)  # the endpoint is free when this returns
        serving.cancel()
        await asyncio.wait((serving,))
        await publisher.close()

    uvloop.run(body())
