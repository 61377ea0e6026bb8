"""KV events: what vLLM's types read in them, and a publisher that waits for nobody."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from inferd.engine.api.errors import ConfigError
from inferd.engine.api.wire.endpoint import is_bound
from inferd.engine.api.wire.kv_events import CLEARED, BlockRemoved, encode_events, with_rank
from inferd.engine.api.wire.kv_publisher import (
    END_OF_REPLAY,
    MOST_KEPT,
    KVPublisher,
    PublisherOptions,
)
from inferd.engine.api.wire.params import Adapter, SamplingParams, SchedulingParams
from inferd.engine.api.wire.zmtp_port import HIGH_WATER_MARK
from inferd.engine.cache.below import offer_to
from inferd.engine.cache.state_checkpoints import StateCheckpointRules
from inferd.engine.cache.table import KVCache
from inferd.engine.core import tier_events
from inferd.engine.core.kv_events import KVEventLog, hash_of
from inferd.engine.core.prefix_loads import PrefixLoads
from inferd.engine.request import Request
from inferd.server.config.settings import Settings
from tests.kv_subscriber import AllBlocksCleared, BlockStored, KVEventBatch, Mirror
from tests.kv_subscriber import BlockRemoved as Removed
from tests.unit.test_prefix_loads import Below

_DIGEST = "ab" * 16


def compute(cache: KVCache, ids: tuple[int, ...], salt: str = "", adapter: Adapter | None = None) -> None:
    """Run one request to its end, so that its full blocks are cached."""
    params = SamplingParams(max_tokens=0, seed=0, adapter=adapter)
    request = Request.create("r", ids, params, SchedulingParams(cache_salt=salt), max_model_len=999)
    table = cache.open(request)
    assert table.admit(table.match(), len(ids))
    table.commit(len(ids))
    table.release()
    cache.close(table)


def taken(log: KVEventLog) -> list[BlockStored | Removed | AllBlocksCleared]:
    decoder = msgspec.msgpack.Decoder(list[BlockStored | Removed | AllBlocksCleared])
    return [event for events in log.take() for event in decoder.decode(events)]


def chain(cache: KVCache, ids: tuple[int, ...], salt: str = "") -> list[int]:
    """The hashes of the full blocks of a prompt."""
    key, found = cache.index.root_key(salt), []
    for start in range(0, len(ids) - cache.block_size + 1, cache.block_size):
        key = cache.index.block_key(key, ids[start : start + cache.block_size])
        found.append(hash_of(key))
    return found


def test_a_chain_is_one_event_and_goes_from_its_end() -> None:
    cache = KVCache(4, 2)
    log = KVEventLog(cache, has_private=False)
    compute(cache, (1, 2, 3, 4, 5))
    first, second = chain(cache, (1, 2, 3, 4))
    stored = BlockStored(
        [first, second], None, [1, 2, 3, 4], 2, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention"
    )
    assert taken(log) == [stored]
    compute(cache, (1, 2, 6, 7, 8))
    (third,) = chain(cache, (1, 2, 6, 7))[1:]
    (stored,) = taken(log)
    assert (stored.parent_block_hash, stored.block_hashes, stored.token_ids) == (first, [third], [6, 7])
    compute(cache, (9, 9, 9, 9, 9, 9))
    removed, stored = taken(log)
    assert isinstance(removed, Removed) and isinstance(stored, BlockStored)
    assert removed.block_hashes == [second, third], "the least recently used goes first"
    assert stored.block_hashes == chain(cache, (9, 9, 9, 9, 9, 9))
    cache.reset()
    assert taken(log) == [AllBlocksCleared()]
    assert taken(log) == []


def test_no_other_tenant_can_be_seen_unless_it_is_asked_for() -> None:
    for has_private in (False, True):
        cache = KVCache(16, 2)
        log = KVEventLog(cache, has_private=has_private)
        log.name_adapter(Adapter(3, _DIGEST), "sql")
        compute(cache, (1, 2, 3, 4), salt="key-1/secret")
        compute(cache, (5, 6), adapter=Adapter(3, _DIGEST))
        compute(cache, (7, 8, 9, 9), salt="key-1", adapter=Adapter(3, _DIGEST))
        events = taken(log)
        assert "secret" not in str(events) and "key-1" not in str(events)
        seen = [(event.token_ids, event.lora_name, event.extra_keys) for event in events]
        open_to_all = ([5, 6], "sql", [("sql",)])
        if not has_private:
            assert seen == [open_to_all]
        else:
            first, second = (cache.index.root_key(salt).hex()[:16] for salt in ("key-1/secret", "key-1"))
            assert seen == [
                ([1, 2, 3, 4], None, [(first,), None]),
                open_to_all,
                ([7, 8, 9, 9], "sql", [("sql", second), ("sql",)]),
            ]
        compute(cache, tuple(range(32)))  # takes the place of all others
        removed, stored = taken(log)
        assert isinstance(removed, Removed) and isinstance(stored, BlockStored)
        assert len(removed.block_hashes) == (5 if has_private else 1)


def test_groups_and_recurrent_states_have_their_own_events() -> None:
    cache = KVCache(16, 2, (None, 3), step_tokens=8, checkpoints=StateCheckpointRules(4, 4))
    log = KVEventLog(cache, has_private=False)
    request = Request.create("r", (1, 2, 3, 4, 5, 6), SamplingParams(max_tokens=0, seed=0), max_model_len=999)
    table = cache.open(request)
    assert table.admit(table.match(), 6)
    assert table.leave_checkpoint(4, 4) is not None
    table.commit(4)
    kinds = [(event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, event.block_hashes)
             for event in taken(log)]  # fmt: skip
    hashes = chain(cache, (1, 2, 3, 4))
    assert kinds == [
        (0, "full_attention", None, hashes),
        (1, "sliding_window", 3, hashes),
        (2, "mamba", None, hashes[1:]),
    ]
    table.release()
    cache.close(table)
    mirror = Mirror()
    mirror.held = {(change.group, hash_of(change.node.key)): change.node.ids for change in cache.index.contents()}
    assert cache.take(14) is not None
    for events in log.take():
        mirror.read_events(events)
    held = {(change.group, hash_of(change.node.key)): change.node.ids for change in cache.index.contents()}
    assert mirror.held == held and 0 < len(held) < 5


class TierSays:
    """A tier whose news the test says."""

    def __init__(self, cache: KVCache, *, has_private: bool = False) -> None:
        self.cache, self.below = cache, Below()
        offer_to(self.below, cache)
        self.log = KVEventLog(cache, has_private=has_private, tier=self.below)
        self.loads = PrefixLoads(cache, self.below, lambda num_tokens: 1.0, lambda: 0.0)

    def say(self, is_there: bool, **which: object) -> None:
        """Give news of each offered piece that has these values."""
        assert self.below.news is not None
        for _, piece in sorted(self.below.pieces):
            if all(getattr(piece, name) == value for name, value in which.items()):
                self.below.news.append((piece, is_there))

    def events(self) -> list[BlockStored | Removed]:
        """Those of the tier."""
        events = [event for event in taken(self.log) if not isinstance(event, AllBlocksCleared)]
        return [event for event in events if event.medium == "DISK"]


def test_blocks_below_the_pool_have_events_of_their_own_medium() -> None:
    """A prompt of 11 blocks is two pieces. One that ends within the first piece makes a third."""
    ids = tuple(range(2 * 11 + 1))
    world = TierSays(KVCache(40, 2))
    compute(world.cache, ids)
    compute(world.cache, (*ids[:6], 99))
    hashes = chain(world.cache, ids[:22])
    assert world.events() == [], "nothing was written yet"
    world.say(True, first=0, num_blocks=3)
    (stored,) = world.events()
    assert stored == BlockStored(
        hashes[:3], None, list(ids[:6]), 2, None, "DISK", None, group_idx=0, kv_cache_spec_kind="full_attention"
    )
    world.say(True)
    (stored,) = world.events()
    assert isinstance(stored, BlockStored)
    assert (stored.parent_block_hash, stored.block_hashes) == (hashes[2], hashes[3:]), "each block once"
    world.say(False, num_blocks=8)
    (removed,) = world.events()
    assert isinstance(removed, Removed) and removed.medium == "DISK"
    assert removed.block_hashes == hashes[3:8], "the first three are in another piece"
    world.say(False)
    assert [event.block_hashes for event in world.events()] in ([hashes[:3] + hashes[8:]], [hashes[8:] + hashes[:3]])
    world.say(True)
    assert world.events() == [], "the content of a piece is known no more once it is gone"
    compute(world.cache, (*ids[:16], 98, 98, 98))
    world.say(True)
    stored = [block for event in world.events() for block in event.block_hashes]
    assert set(hashes[:8]) < set(stored), "what was hit was offered again"
    assert world.below.news is not None
    world.below.news.append((None, False))
    removed = [block for event in world.events() for block in event.block_hashes]
    assert sorted(map(int, removed)) == sorted(map(int, stored)), "all of it may be gone"


def test_what_a_request_finds_below_is_told_and_what_the_engine_forgets_is_gone() -> None:
    before, ids = KVCache(40, 2), tuple(range(2 * 11 + 1))
    world = TierSays(KVCache(40, 2))
    offer_to(world.below, before)
    compute(before, ids)
    hashes = chain(before, ids[:22])
    request = Request.create("r", ids, SamplingParams(max_tokens=0, seed=0), max_model_len=999)
    assert world.loads.open(request)
    world.below.searches[0].is_done = True
    assert list(world.loads.ended()) == []
    (stored,) = world.events()
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.token_ids) == (hashes, list(ids[:22]))
    world.loads.abort(request)
    world.below.loads[0].news = [False, False]
    list(world.loads.ended())
    assert world.loads.open(request)
    world.below.searches[1].is_done = True
    assert list(world.loads.ended()) == [] and world.events() == [], "it is found again"
    table = world.cache.open(request)
    assert table.admit(table.match(), len(ids))
    table.commit(len(ids))
    table.forget()
    table.release()
    world.cache.close(table)
    (removed,) = world.events()
    assert sorted(map(int, removed.block_hashes)) == sorted(hashes)


def test_a_subscriber_that_was_told_to_forget_all_is_told_again_of_what_is_found() -> None:
    world = TierSays(KVCache(40, 2))
    compute(world.cache, (1, 2, 3, 4, 5))
    world.say(True)
    assert len(world.events()) == 1
    other = Request.create("o", (1, 2, 6, 7, 8), SamplingParams(max_tokens=0, seed=0), max_model_len=999)
    compute(world.cache, (1, 2, 6, 7, 8))
    world.cache.reset()
    assert world.loads.open(other)
    world.below.searches[0].is_done = True
    list(world.loads.ended())
    world.say(False)
    assert taken(world.log) == [AllBlocksCleared()], "all of it is forgotten, also the directory's blocks"
    request = Request.create("r", (1, 2, 3, 4, 5), SamplingParams(max_tokens=0, seed=0), max_model_len=999)
    assert world.loads.open(request)
    world.below.searches[1].is_done = True
    list(world.loads.ended())
    assert [event.block_hashes for event in world.events()] == [chain(world.cache, (1, 2, 3, 4))]


def test_windows_states_and_tenants_below_the_pool() -> None:
    cache = KVCache(16, 2, (None, 3), step_tokens=8, checkpoints=StateCheckpointRules(4, 4))
    world = TierSays(cache)
    request = Request.create("r", (1, 2, 3, 4, 5, 6), SamplingParams(max_tokens=0, seed=0), max_model_len=999)
    table = cache.open(request)
    assert table.admit(table.match(), 6)
    assert table.leave_checkpoint(4, 4) is not None
    table.commit(6)
    table.release()
    world.say(True)
    hashes = chain(cache, (1, 2, 3, 4, 5, 6))
    told = {(event.group_idx, event.kv_cache_spec_kind): event.block_hashes
            for event in world.events() if isinstance(event, BlockStored)}  # fmt: skip
    assert told[0, "full_attention"] == hashes
    assert set(told[1, "sliding_window"]) <= set(hashes)
    assert told[2, "mamba"] == hashes[1:2]
    for has_private in (False, True):
        world = TierSays(KVCache(16, 2), has_private=has_private)
        compute(world.cache, (1, 2, 3, 4), salt="key-1/secret")
        world.say(True)
        events = world.events()
        assert "secret" not in str(events) and len(events) == has_private


def test_the_memory_of_what_is_below_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_events, "_MOST_HELD", 3)
    monkeypatch.setattr(tier_events, "_MOST_OFFERED", 2)
    world, mirror = TierSays(KVCache(40, 2)), set[int]()
    for number in range(9):
        compute(world.cache, (number, number, 7))
        if number != 4:
            world.say(True)
        for event in world.events():
            for block_hash in map(int, event.block_hashes):
                assert isinstance(event, BlockStored) != (block_hash in mirror)
                mirror ^= {block_hash}
    assert len(mirror) == 3


def test_a_batch_is_bounded() -> None:
    removed = [BlockRemoved([1 << 63] * 4096, "CPU", 0)] * 9
    sizes = [len(bytes(events)) for events in encode_events(removed)]
    assert len(sizes) == 9 and max(sizes) < 64 * 1024
    cache = KVCache(4096, 16)
    log = KVEventLog(cache, has_private=True)
    compute(cache, tuple(range(200_000, 265_536)), salt="key-" + "f" * 64)
    sizes = [len(bytes(events)) for events in log.take()]
    assert len(sizes) == 8 and max(sizes) < 64 * 1024, sizes


# -- the sockets -------------------------------------------------------------------------------------------------------


class Reader:
    """A SUB socket, and a REQ-like socket that asks for a replay."""

    def __init__(self, folder: Path, topic: bytes = b"", hwm: int = 0) -> None:
        self._context = zmq.asyncio.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.set_hwm(hwm)
        self.sub.connect(f"ipc://{folder}/pub")
        self.sub.subscribe(topic)
        self.replay = self._context.socket(zmq.DEALER)
        self.replay.connect(f"ipc://{folder}/replay")

    async def next(self) -> tuple[int, bytes, bytes]:
        """(sequence number, batch, topic) of the next message."""
        async with asyncio.timeout(20):
            topic, sequence, batch = await self.sub.recv_multipart()
        return int.from_bytes(sequence, "big"), batch, topic

    async def again(self, first: int) -> dict[int, bytes]:
        """Kept batches from sequence number `first` on."""
        await self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        found: dict[int, bytes] = {}
        while True:
            async with asyncio.timeout(20):
                empty, _, sequence, batch = await self.replay.recv_multipart()
            assert empty == b""
            if sequence == END_OF_REPLAY:
                assert batch == b""
                return found
            found[int.from_bytes(sequence, "big")] = batch

    def close(self) -> None:
        self._context.destroy(linger=0)


def published(
    folder: Path, use: Callable[[KVPublisher, Reader], Awaitable[None]], *, buffer_bytes: int = 2**20, topic: str = ""
) -> None:
    """Run `use` with a publisher, and a reader that gets its messages."""

    async def run() -> None:
        options = PublisherOptions(f"ipc://{folder}/pub", f"ipc://{folder}/replay", topic, buffer_bytes)
        publisher, reader = KVPublisher(options, 1), Reader(folder, topic.encode())
        serving = asyncio.create_task(publisher.serve())
        try:
            while not await reader.sub.poll(5):
                publisher.publish(0, CLEARED)  # until the subscription has arrived
            while await reader.sub.poll(20):
                await reader.next()
            await use(publisher, reader)
        finally:
            serving.cancel()
            await asyncio.wait((serving,))
            await publisher.close()
            reader.close()

    asyncio.run(run())


def test_messages_are_those_of_vllm_and_past_ones_are_sent_again(tmp_path: Path) -> None:
    events = next(encode_events([BlockRemoved([7], "GPU", 0)]))

    async def use(publisher: KVPublisher, reader: Reader) -> None:
        for _ in range(3):
            publisher.publish(0, events)
        messages = [await reader.next() for _ in range(3)]
        first = messages[0][0]
        assert [message[0] for message in messages] == [first, first + 1, first + 2]
        assert {message[2] for message in messages} == {b"kv@tiny"}
        batch = msgspec.msgpack.decode(messages[1][1], type=KVEventBatch)
        assert batch.events == [Removed([7], "GPU", 0)] and batch.data_parallel_rank == 0
        assert await reader.again(first + 1) == {number: batch for number, batch, _ in messages[1:]}
        assert await reader.again(first + 3) == {}
        whole = await reader.again(0)
        assert list(whole) == list(range(min(whole), first + 3))
        assert msgspec.msgpack.decode(whole[min(whole)], type=KVEventBatch).events == [AllBlocksCleared()]
        for wrong in ((b"",), (b"", b"123"), (b"", b"", b"12345678")):
            await reader.replay.send_multipart(wrong)
        assert len(await reader.again(first)) == 3

    published(tmp_path, use, topic="kv@tiny")


def test_kept_batches_are_bounded_in_number_and_bytes(tmp_path: Path) -> None:
    events = next(encode_events([BlockRemoved([1 << 63] * 100, "CPU", 0)]))

    async def use(publisher: KVPublisher, reader: Reader) -> None:
        for _ in range(200):
            publisher.publish(0, events)
        kept = await reader.again(0)
        assert sum(map(len, kept.values())) <= 64 * 1024 < sum(map(len, kept.values())) + 1024
        for _ in range(MOST_KEPT + 10):
            publisher.publish(0, CLEARED)
        assert len(await reader.again(0)) < MOST_KEPT

    published(tmp_path, use, buffer_bytes=64 * 1024)


def test_a_subscriber_that_does_not_read_sees_a_gap_and_delays_nobody(tmp_path: Path) -> None:
    events = next(encode_events([BlockRemoved([1 << 63] * 4000, "CPU", 0)]))

    async def use(publisher: KVPublisher, reader: Reader) -> None:
        slow = Reader(tmp_path, hwm=1)
        while not await slow.sub.poll(5):
            publisher.publish(0, CLEARED)
        while await reader.sub.poll(20):
            await reader.next()
        num_sent = HIGH_WATER_MARK + 200  # what the system's buffers hold comes on top
        received = []
        for _ in range(num_sent):
            publisher.publish(0, events)
            received.append((await reader.next())[0])
        assert received == list(range(received[0], received[-1] + 1)), "who reads loses nothing"
        seen = []
        while await slow.sub.poll(200):
            seen.append((await slow.next())[0])
        assert seen == sorted(seen) and len(seen) < num_sent
        assert list(await slow.again(received[-5])) == received[-5:]
        slow.close()

    published(tmp_path, use)


def test_each_replica_has_an_endpoint_of_its_own() -> None:
    assert [with_rank("tcp://*:5557", rank) for rank in (0, 1, 7)] == ["tcp://*:5557", "tcp://*:5558", "tcp://*:5564"]
    assert with_rank("ipc:///run/kv", 2) == "ipc:///run/kv_dp2"
    assert [is_bound(each) for each in ("tcp://*:1", "tcp://[::]:1", "ipc://x", "tcp://gateway:1")] == [True] * 3 + [
        False
    ]


def test_an_endpoint_in_use_is_refused(tmp_path: Path) -> None:
    async def twice() -> None:
        options = PublisherOptions("tcp://*:5557", f"ipc://{tmp_path}/nowhere/replay")
        KVPublisher(options, 1)

    with pytest.raises(ConfigError, match=r"cannot publish KV events at (tcp|ipc)://.*; give --kv-events"):
        asyncio.run(twice())


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"kv_events": "5557"}, "must be an endpoint of ZeroMQ"),
        ({"kv_events_replay": "tcp://*:5558"}, "set --kv-events too"),
        ({"kv_events": "tcp://*:1", "kv_events_replay": "tcp://*:1"}, "give two endpoints"),
        (
            {"kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:5558", "replicas": 2},
            r"share tcp://\*:5558: each of 2 replicas adds its index to both ports, so give ports",
        ),
        ({"kv_events": "tcp://*:1", "prefix_caching": False}, "needs the prefix cache"),
        ({"kv_events": "tcp://*:1", "api_key": "k"}, "pass --kv-events-private"),
    ],
)
def test_settings_without_effect_are_refused(given: dict[str, object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        Settings(**given)  # type: ignore[arg-type]
    assert Settings(kv_events="tcp://*:1", api_key="k", kv_events_private=True).kv_events == "tcp://*:1"  # type: ignore[arg-type]


_PUBLISH_AND_CLOSE = """
import asyncio, sys
from inferd.engine.api.wire.kv_publisher import KVPublisher, PublisherOptions

async def main():
    publisher = KVPublisher(PublisherOptions(sys.argv[1]), 1)
    serving = asyncio.create_task(publisher.serve())
    await asyncio.sleep(0.3)
    serving.cancel()
    await publisher.close()

asyncio.run(main())
"""


def test_a_peer_that_speaks_http_ends_no_server() -> None:
    """libzmq could abort the process when the socket was closed, so another process publishes."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            with suppress(OSError):  # the listener was closed
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(100)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 300\r\n\r\n" + 300 * b"x")

        pool.submit(answer)
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        command = [sys.executable, "-P", "-c", _PUBLISH_AND_CLOSE, endpoint]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        listener.shutdown(socket.SHUT_RDWR)
    assert ended.returncode == 0
    assert ended.stderr.endswith("it does not speak ZeroMQ's protocol\n") and ended.stderr.count("\n") == 1
