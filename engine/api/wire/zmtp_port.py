"""The peers of one endpoint: accepts or makes their connections, and drops those that exceed a bound.

The server keeps one frame of a peer, the parts of one message, and the batches that wait for it. The batches that wait
have a bound for each peer and one for all. A subclass of `Port` says what messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar, NoReturn, cast

from inferd.engine.api.wire.endpoint import BACKLOG, Listener, host_and_port, is_bound
from inferd.engine.api.wire.zmtp import GREETING, PeerError, Reader, Received, ping, pong, ready, socket_type_of

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 1000
"""Messages that wait for one peer, of up to 64 KiB each; further ones are dropped for it."""
MAX_WAITING_BYTES = 64 * 2**20
"""Most bytes that wait for all peers, as if they shared none. It takes two peers to exceed them."""
MAX_PEERS = 256
"""Most connections to one endpoint."""
TICK_S = 10.0
"""Seconds between two PINGs to each peer."""
MAX_BYTES_PER_TICK = 16 * 1024
"""Most bytes that a peer may send between two ticks. A subscriber sends some 150 in its whole life, and 12 a PING."""
MAX_SILENT_TICKS = 3
MAX_FULL_TICKS = 3
"""Ticks for which a connection may have no room while messages wait, whatever the peer sends."""
MAX_HANDSHAKE_TICKS = 2

_BUFFERED_BYTES = 64 * 1024
"""Bytes in a connection's own buffer from which on messages wait."""
_LINGER_S = 0.2
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.1, 2.0
"""Seconds between two attempts to connect."""
_CONNECT_S = 10.0


class Peer(asyncio.Protocol):
    """One connection."""

    def __init__(self, port: Port) -> None:
        self._port, self._reader = port, Reader()
        self._transport: asyncio.Transport
        self._waiting: deque[tuple[bytes, ...]] = deque()
        self.num_waiting_bytes = self._num_full_ticks = 0
        """Bytes of the messages that wait, and ticks since the connection's own buffer had room."""
        self._num_bytes = self._num_ticks = 0
        """Bytes received since the last tick, and ticks in all."""
        self.num_silent_ticks = 0
        """Ticks since anything was received."""
        self._is_finishing = False
        self.is_ready = False
        """Whether the handshake has ended."""
        self.room = asyncio.Event()
        """Set while the connection's own buffer has room."""
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(_BUFFERED_BYTES)
        self.room.set()
        if self._port.add(self):
            self._transport.write(GREETING)
        else:
            self.drop(f"there are {MAX_PEERS} connections already, the most allowed")

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._forget()
        self.lost.set()
        self._port.remove(self)

    def data_received(self, data: bytes) -> None:
        self.num_silent_ticks = 0
        self._num_bytes += len(data)
        try:
            if self._num_bytes > MAX_BYTES_PER_TICK:
                raise PeerError(f"it sent more than {MAX_BYTES_PER_TICK} bytes within {TICK_S:g} s, the most allowed")
            for received in self._reader.feed(data):
                self._take(received)
        except PeerError as error:
            self.drop(str(error))

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()
        self._num_full_ticks = 0
        while self._waiting and self.room.is_set() and not self._transport.is_closing():
            pieces = self._waiting.popleft()
            self._count(-sum(map(len, pieces)))
            self._transport.writelines(pieces)
        if self._is_finishing and not self._waiting:
            self._transport.close()

    def send(self, *pieces: bytes) -> None:
        """Send one message, which is cut into pieces anywhere. It is dropped if too many wait."""
        if self._transport.is_closing():
            return
        if self.room.is_set():
            self._transport.writelines(pieces)
        elif len(self._waiting) < HIGH_WATER_MARK:
            self._waiting.append(pieces)
            self._count(sum(map(len, pieces)))
            self._port.keep_to_bound()

    def tick(self) -> None:
        """Drop the peer if it is silent or does not read, otherwise ask for a sign of life."""
        self._num_bytes = 0
        self._num_ticks += 1
        self.num_silent_ticks += 1
        self._num_full_ticks += bool(self._waiting)
        if self.num_silent_ticks > MAX_SILENT_TICKS:
            self.drop(f"it was silent for {MAX_SILENT_TICKS * TICK_S:g} s")
        elif self._num_full_ticks > MAX_FULL_TICKS:
            self.drop(f"it read too little for {MAX_FULL_TICKS * TICK_S:g} s, while messages waited for it")
        elif self.is_ready:
            self._answer(ping())
        elif self._num_ticks >= MAX_HANDSHAKE_TICKS:
            self.drop("it did not end ZeroMQ's handshake in time")

    def drop(self, why: str) -> None:
        """Close the connection at once, and forget what waits for it."""
        self._port.report(self._transport.get_extra_info("peername"), why)
        self.abort()

    def abort(self) -> None:
        self._forget()
        self._transport.abort()

    def finish(self) -> None:
        """Close the connection when all is sent."""
        self._is_finishing = True
        if not self._waiting:
            self._transport.close()

    def _forget(self) -> None:
        self._waiting.clear()
        self._count(-self.num_waiting_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_waiting_bytes += num_bytes
        self._port.num_waiting_bytes += num_bytes

    def _take(self, received: Received) -> None:
        if received.kind == "greeting":
            self._transport.write(ready(self._port.socket_type))
        elif received.kind == "message":
            if not self.is_ready:
                raise PeerError("it sent a message before it was ready")
            self._port.on_message(self, received.parts)
        else:
            self._take_command(*received.parts)

    def _take_command(self, name: bytes, content: bytes) -> None:
        if name == b"READY":
            theirs, allowed = socket_type_of(content), self._port.peer_types
            if theirs not in allowed:
                known = " or ".join(each.decode() for each in sorted(allowed))
                raise PeerError(f"it has a socket of type {theirs[:20]!a}, but only {known} can be served here")
            self.is_ready = True
        elif not self.is_ready:
            raise PeerError("it sent a command before it was ready")
        elif name == b"PING":
            self._answer(pong(content))
        else:
            self._port.on_command(self, name, content)

    def _answer(self, command: bytes) -> None:
        """A peer that reads nothing gets no signs of life, because nothing may wait without a bound."""
        if self.room.is_set() and not self._transport.is_closing():
            self._transport.write(command)


class Port(ABC):
    """One endpoint and its peers."""

    socket_type: ClassVar[bytes]
    peer_types: ClassVar[frozenset[bytes]]

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.peers: set[Peer] = set()
        self.num_waiting_bytes = 0
        """Bytes of the messages that wait for all peers."""
        self._num_unreported = 0
        self._has_reported = False
        self._listener: Listener | None = None

    def bind(self) -> None:
        """Listen at the endpoint, if it is one to bind. Raises `OSError` if it cannot be used."""
        if is_bound(self.endpoint):
            self._listener = Listener(self.endpoint)
        else:
            host_and_port(self.endpoint)

    @abstractmethod
    def on_message(self, peer: Peer, parts: tuple[bytes, ...]) -> None:
        """A whole message came. May raise `PeerError`."""

    @abstractmethod
    def on_command(self, peer: Peer, name: bytes, content: bytes) -> None:
        """Another command than those of the protocol itself came."""

    @abstractmethod
    def on_lost(self, peer: Peer) -> None:
        """The connection is gone."""

    async def serve(self) -> NoReturn:
        """Serve peers until cancelled. Connections that are open then stay so until `close`."""
        async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as at_end:
            if self._listener is None:
                group.create_task(self._dial())
            else:
                at_end.callback((await self._accept(self._listener.socket)).close)
            while True:
                await asyncio.sleep(TICK_S)
                self.tick()

    async def close(self) -> None:
        """Close the connections when all is sent, or after a fifth of a second."""
        self.release()
        peers = list(self.peers)
        for peer in peers:
            peer.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                for peer in peers:
                    await peer.lost.wait()
        for peer in list(self.peers):
            peer.abort()

    def release(self) -> None:
        """Let others bind the endpoint."""
        if self._listener is not None:
            self._listener.close()

    def add(self, peer: Peer) -> bool:
        """Whether there is room for a peer."""
        if len(self.peers) >= MAX_PEERS:
            return False
        self.peers.add(peer)
        return True

    def remove(self, peer: Peer) -> None:
        if peer in self.peers:
            self.peers.remove(peer)
            self.on_lost(peer)

    def keep_to_bound(self) -> None:
        """Drop the peers for which most bytes wait, as long as too many wait for all."""
        while self.num_waiting_bytes > MAX_WAITING_BYTES:
            most = max(self.peers, key=lambda peer: peer.num_waiting_bytes)
            rule = f"more than {MAX_WAITING_BYTES} bytes waited for all connections, the most allowed"
            most.drop(f"{rule}, and {most.num_waiting_bytes} of these for it")

    def tick(self) -> None:
        if self._num_unreported:
            logger.warning("KV events at %s: dropped %d more connections", self.endpoint, self._num_unreported)
        self._has_reported, self._num_unreported = False, 0
        for peer in list(self.peers):
            peer.tick()

    def report(self, peer_name: object, why: str) -> None:
        """Log a dropped connection. Between two ticks one is named, and the others are counted."""
        if self._has_reported:
            self._num_unreported += 1
            return
        self._has_reported = True
        name = "{}:{}".format(*peer_name[:2]) if isinstance(peer_name, tuple) else "a process of this machine"
        logger.warning("KV events at %s: dropped the connection of %s: %s", self.endpoint, name, why)

    async def _accept(self, listener: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        create = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        return await create(lambda: Peer(self), sock=listener, backlog=BACKLOG)

    async def _dial(self) -> NoReturn:
        """Keep one connection."""
        host, port = host_and_port(self.endpoint)
        loop, pause_s = asyncio.get_running_loop(), _LEAST_PAUSE_S
        while True:
            peer = Peer(self)
            # UnicodeError: the host is no name that DNS could have.
            with contextlib.suppress(OSError, UnicodeError):
                async with asyncio.timeout(_CONNECT_S):
                    await loop.create_connection(lambda peer=peer: peer, host, port)  # type: ignore[misc]
                await peer.lost.wait()
            pause_s = _LEAST_PAUSE_S if peer.is_ready else min(2 * pause_s, _MOST_PAUSE_S)
            await asyncio.sleep(pause_s)
