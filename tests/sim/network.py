"""The sockets and shared memory between the server and its engines, by name, in this process.

`Network` stands for the module `zmq` under the real client, and for the files that both sides map. A pipe carries
frames in order, each after a delay, and applies its faults to them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf
from random import Random
from types import SimpleNamespace

Spoil = Callable[[bytes], list[bytes]]
"""Returns the frames that arrive in place of one frame."""


class SharedMemory(bytearray):
    """A mapped file. Its bytes stay readable after it is closed, because the other side may still read them."""

    def close(self) -> None:
        """There is nothing to close."""


class Pipe:
    """One direction of one engine's wire."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._arrived: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.num_sent = 0
        self.sent: list[bytes] = []
        """All frames, before any fault was applied."""
        self.spoils: dict[int, Spoil] = {}
        """Number of a frame -> its fault; removed once applied."""
        self.delays_s: dict[int, float] = {}
        self.losses: set[int] = set()
        """Numbers of frames that never arrive."""
        self.mute_from = inf
        """Number of the first frame from which on none arrives, so that no later number shows the gap."""
        self.on_lost: Callable[[], None] = lambda: None

    def send(self, frame: bytes) -> None:
        number, self.num_sent = self.num_sent, self.num_sent + 1
        self.sent.append(frame)
        if number in self.losses or number >= self.mute_from:
            self.on_lost()
            return
        spoil = self.spoils.pop(number, None)
        self._carry([frame] if spoil is None else spoil(frame), self.delays_s.get(number, 0.0))

    def _carry(self, frames: list[bytes], delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._rng.choice((0.0, 0.0002, 0.0002, 0.003)) + delay_s
        if self._under_way:
            due_s = max(due_s, self._under_way[-1][0])
        self._under_way += [(due_s, each) for each in frames]
        loop.call_at(due_s, self._arrive)

    def _arrive(self) -> None:
        # Timers fire up to the clock's resolution too early.
        now = asyncio.get_running_loop().time() + 1e-6
        while self._under_way and self._under_way[0][0] <= now:
            self._arrived.append(self._under_way.popleft()[1])
        if self._arrived and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def lose_all(self) -> None:
        """Lose every frame under way."""
        self._under_way.clear()

    async def wait(self) -> None:
        """Return once a frame has arrived."""
        while not self._arrived:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def take(self) -> bytes | None:
        """The next frame that has arrived, or None."""
        return self._arrived.popleft() if self._arrived else None

    # -- as a socket of the client's ---------------------------------------------------------------------------------

    async def recv(self) -> bytes:
        await self.wait()
        return self._arrived.popleft()


class _Socket:
    """A socket of the client. It becomes a pipe once it is bound."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._pipe: Pipe | None = None

    def bind(self, endpoint: str) -> None:
        self._pipe = self._network.pipe(endpoint)

    def send(self, frame: bytes, flags: int = 0) -> None:
        assert self._pipe is not None, "a frame is sent by a socket that is closed or not bound"
        self._pipe.send(frame)

    async def recv(self) -> bytes:
        assert self._pipe is not None, "a socket that is closed or not bound is read"
        return await self._pipe.recv()

    def set_hwm(self, num_frames: int) -> None:
        """The simulated queue is never full."""

    def set(self, option: int, value: int) -> None:
        """Simulated sockets do not linger."""

    def close(self) -> None:
        self._pipe = None


class Network:
    """All pipes and all shared memory of one run."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._pipes: dict[str, Pipe] = {}
        self._shared: list[SharedMemory] = []

    def pipe(self, endpoint: str) -> Pipe:
        """The pipe of that name, for both ends."""
        return self._pipes.setdefault(endpoint, Pipe(self._rng))

    def allocate(self, num_bytes: int) -> int:
        """As `shared_memory.allocate`."""
        self._shared.append(SharedMemory(num_bytes))
        return len(self._shared) - 1

    def open_map(self, descriptor: int) -> SharedMemory:
        """As `shared_memory.open_map`."""
        return self._shared[descriptor]

    def as_zmq(self) -> SimpleNamespace:
        """The part of the module `zmq` that the client uses."""
        context = SimpleNamespace(socket=lambda kind: _Socket(self), term=lambda: None)
        return SimpleNamespace(
            Context=lambda shadow=None: context,
            Socket=lambda context, kind: _Socket(self),
            asyncio=SimpleNamespace(Context=lambda: context),
            PUSH=8,
            PULL=7,
            LINGER=17,
            NOBLOCK=1,
            Again=BlockingIOError,
        )
