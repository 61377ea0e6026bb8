"""The processes of an engine's other ranks: rank 0 starts them, sends them every step plan, and ends with them.

A follower runs `inferd.engine.process.rank`. It belongs to rank 0's process group, and the kernel ends it with rank 0.
Each has a socket to rank 0, on which its launch message and then the plans come as msgpack after their length. It
answers once, when it has loaded its part. If a follower ends after that, rank 0 ends at once: its next step would wait
for ever. The supervisor then starts the whole engine anew. Imports no torch, so that followers can start early.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

import msgspec

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.errors import StartError, start_error
from inferd.engine.api.memory.activations import EXCHANGE_BYTES, EXCHANGE_HEADER_BYTES
from inferd.engine.api.process.logs import DEFAULT_STYLE, LogStyle
from inferd.engine.api.process.shared_memory import allocate
from inferd.engine.api.process.supervisor import Launch, describe_exit
from inferd.engine.sched.plan import StepPlan

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-P", "-m", "inferd.engine.process.rank")
_LENGTH_BYTES = 8
_EXIT_FAILED = 1
_CLOSE_S = 5.0


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """A follower's configuration: the first message on its socket."""

    config: EngineConfig
    index: int
    exchange_fd: int
    log_style: LogStyle
    parent_pid: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The follower has loaded its part of the weights, and allocated its part of the KV pool."""

    weights_bytes: int
    kv_bytes: int


class NotLoaded(msgspec.Struct, frozen=True, tag="not_loaded"):
    """The follower cannot start. `kind` names the error class."""

    kind: str
    message: str


_ENCODER = msgspec.msgpack.Encoder()
_ANSWERS: msgspec.msgpack.Decoder[Loaded | NotLoaded] = msgspec.msgpack.Decoder(Loaded | NotLoaded)
PLANS = msgspec.msgpack.Decoder(StepPlan)
LAUNCHES = msgspec.msgpack.Decoder(RankLaunch)


class Link:
    """One end of the socket between rank 0 and another rank."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: RankLaunch | StepPlan | Loaded | NotLoaded) -> None:
        self.send_encoded(_ENCODER.encode(message))

    def send_encoded(self, body: bytes) -> None:
        self._end.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def receive(self) -> bytes | None:
        """The next message; None if the other end is gone."""
        length = self._read(_LENGTH_BYTES)
        return None if length is None else self._read(int.from_bytes(length, "little"))

    def close(self) -> None:
        self._end.close()

    def _read(self, num_bytes: int) -> bytes | None:
        whole = bytearray()
        while len(whole) < num_bytes:
            try:
                part = self._end.recv(num_bytes - len(whole))
            except ConnectionResetError:  # it ended without reading what it was sent
                part = b""
            if not part:
                return None
            whole += part
        return bytes(whole)


@dataclass(frozen=True, slots=True)
class _Follower:
    index: int
    process: subprocess.Popen[bytes]
    link: Link


class Followers:
    """The other ranks of this engine, seen from rank 0. An engine of one rank has none."""

    def __init__(self) -> None:
        self.exchange_fd: int | None = None
        """Memory through which all ranks exchange, open until `close`."""
        self._all: list[_Follower] = []
        self._is_closing = False

    @classmethod
    def start(cls, config: EngineConfig, log_style: LogStyle = DEFAULT_STYLE) -> Followers:
        """Start a process for each rank but the first. Raises `StartError` if the system cannot."""
        count = config.tensor_parallel_size
        if count == 1:
            return cls()
        followers = cls()
        try:
            followers.exchange_fd = allocate(EXCHANGE_HEADER_BYTES + count * EXCHANGE_BYTES)
            for index in range(1, count):
                followers._start(index, config, log_style)
        except OSError as error:
            followers.close()
            raise StartError(f"cannot start {count} ranks: {error.strerror or error}") from error
        return followers

    def _start(self, index: int, config: EngineConfig, log_style: LogStyle) -> None:
        assert self.exchange_fd is not None
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self.exchange_fd),
            )
        link = Link(ours)
        self._all.append(_Follower(index, process, link))
        launch = RankLaunch(
            config=config,
            index=index,
            exchange_fd=self.exchange_fd,
            log_style=log_style,
            parent_pid=os.getpid(),
        )
        link.send(launch)

    def wait_loaded(self) -> tuple[Loaded, ...]:
        """The answers of all, once they have loaded. From then on their end is this process's end.

        Raises `StartError` with the message of a rank that cannot start.
        """
        answers = tuple(self._answer(follower) for follower in self._all)
        for follower in self._all:
            threading.Thread(target=self._watch, args=(follower,), name="inferd-rank", daemon=True).start()
        return answers

    def _answer(self, follower: _Follower) -> Loaded:
        body = follower.link.receive()
        if body is None:
            code = follower.process.wait()
            raise StartError(f"rank {follower.index} {describe_exit(code)} while it loaded its part of the model")
        answer = _ANSWERS.decode(body)
        if isinstance(answer, NotLoaded):
            raise start_error(answer.kind, f"rank {follower.index}: {answer.message}")
        return answer

    def _watch(self, follower: _Follower) -> None:
        code = follower.process.wait()
        if not self._is_closing:
            logger.error("rank %d %s: the engine ends with it", follower.index, describe_exit(code))
            os._exit(_EXIT_FAILED)

    def send(self, plan: StepPlan) -> None:
        """Have all run `plan` after those that were sent before."""
        if self._all:
            body = _ENCODER.encode(plan)
            for follower in self._all:
                follower.link.send_encoded(body)

    def close(self) -> None:
        """End them, when they have run what was sent. Safe to call twice."""
        self._is_closing = True
        for follower in self._all:
            follower.link.close()
        for follower in self._all:
            try:
                follower.process.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        self._all.clear()
        if self.exchange_fd is not None:
            os.close(self.exchange_fd)
            self.exchange_fd = None


def started_early(line: bytes) -> tuple[Followers, ...]:
    """The followers of a `Launch` in JSON; none if the system cannot start them."""
    launch = msgspec.json.decode(line, type=Launch)
    try:
        return (Followers.start(launch.config, launch.log_style),)
    except StartError:
        return ()
