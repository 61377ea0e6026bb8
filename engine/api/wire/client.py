"""The server's end of the wire: sends messages without waiting, and receives messages as they come.

It owns the two sockets in the supervisor's run directory and the sequence numbers. It knows nothing of requests.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from inferd.engine.api.errors import EngineDeadError, StartError
from inferd.engine.api.wire.messages import FromEngine, ToEngine, WireError, decode_from_engine, encode

HIGH_WATER_MARK = 100_000
"""Frames that a socket holds before sending fails. The router's bound on waiting requests stays far below it."""


TO_ENGINE = "to-engine"
"""Name of a socket in an engine's run directory, until the server removes the directory."""


def to_engine_endpoint(run_dir: Path) -> str:
    return f"ipc://{run_dir}/{TO_ENGINE}"


def from_engine_endpoint(run_dir: Path) -> str:
    return f"ipc://{run_dir}/from-engine"


@dataclass(frozen=True, slots=True)
class FrameCounts:
    """Numbers of frames that one end of a wire has sent and received."""

    num_sent: int = 0
    num_received: int = 0
    is_awaited: bool = False
    """Whether `receive` is waiting: then every frame that has arrived is counted."""


class EngineClient:
    """The server's two sockets of one engine. Create it on the event loop that receives."""

    def __init__(self, run_dir: Path, epoch: int, on_first_frame: Callable[[], None] = lambda: None) -> None:
        """Bind both sockets. Raises `StartError` if there cannot be sockets in `run_dir`.

        `on_first_frame` is called when the engine has connected both sockets: their names are no longer needed.
        """
        self._on_first_frame = on_first_frame
        self._epoch = epoch
        self._num_sent = self._num_received = 0
        self._is_awaited = False
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.SyncSocket | zmq.asyncio.Socket] = []
        try:
            self._out = zmq.Socket(zmq.Context(self._context), zmq.PUSH)
            self._sockets.append(self._out)
            self._in = self._context.socket(zmq.PULL)
            self._sockets.append(self._in)
            for socket in self._sockets:
                socket.set_hwm(HIGH_WATER_MARK)
                socket.set(zmq.LINGER, 0)
            self._out.bind(to_engine_endpoint(run_dir))
            self._in.bind(from_engine_endpoint(run_dir))
        except zmq.ZMQError as error:
            self.close()
            way_out = "set TMPDIR to a writable directory with a short name"
            if error.errno == errno.EMFILE:
                way_out = "let this process open more files (ulimit -n)"
            raise StartError(f"cannot create sockets in {run_dir}: {error.strerror}; {way_out}") from error

    @property
    def frame_counts(self) -> FrameCounts:
        """Numbers of frames here, to be compared with those that the engine reports."""
        return FrameCounts(self._num_sent, self._num_received, self._is_awaited)

    def send(self, message: ToEngine) -> None:
        """Hand a message to the socket; never blocks. Raises `EngineDeadError` if the engine no longer reads."""
        frame = encode(message, self._epoch, self._num_sent)
        try:
            self._out.send(frame, zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineDeadError(f"the engine has left {HIGH_WATER_MARK} messages unread") from error
        self._num_sent += 1

    async def receive(self) -> FromEngine:
        """The next message. Raises `EngineDeadError` if a frame is lost, repeated or damaged."""
        self._is_awaited = True
        try:
            frame = await self._in.recv()
        finally:
            self._is_awaited = False
        try:
            message = decode_from_engine(frame, self._epoch, self._num_received)
        except WireError as error:
            raise EngineDeadError(f"the engine's messages cannot be trusted: {error}") from error
        if self._num_received == 0:
            self._on_first_frame()
        self._num_received += 1
        return message

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()
