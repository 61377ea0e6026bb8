"""The processes of an engine's other ranks: rank 0 starts them, sends them every step plan, and ends with them.

A follower runs `inferd.engine.process.rank`. It belongs to rank 0's process group, and the kernel ends it with rank 0.
Each has a socket to rank 0, on which its launch message and then the plans come as msgpack after their length. It
says when it has imported its libraries, and answers once, when it has loaded its part. If a follower ends or is
stopped by a signal, rank 0 ends: its next step would wait for ever. If one hangs, so does rank 0's step, which the
server notices. The supervisor then starts the whole engine anew.

Imports no torch, so that followers can start early.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.errors import StartError, start_error
from inferd.engine.api.memory.activations import EXCHANGE_BYTES, EXCHANGE_HEADER_BYTES
from inferd.engine.api.process.engine_process import EngineLaunch, describe_exit
from inferd.engine.api.process.logs import LogStyle
from inferd.engine.api.process.processor_time import ProcessorTime
from inferd.engine.api.process.shared_memory import allocate
from inferd.engine.sched.plan import StepPlan

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-P", "-m", "inferd.engine.process.rank")
_LENGTH_BYTES = 8
_EXIT_FAILED = 1
_CLOSE_S = 5.0
_TICK_S = 0.25
_MAX_STOPPED_S = 5.0
"""The server has the same patience with rank 0."""


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """A follower's configuration: the first message on its socket."""

    config: EngineConfig
    index: int
    exchange_fd: int
    log_style: LogStyle


class Joins(msgspec.Struct, frozen=True, tag="joins"):
    """The follower is about to join the other ranks' process group, in which all wait for all."""


class RankLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The follower has loaded its part of the weights, and allocated its part of the KV pool."""

    weights_bytes: int
    kv_bytes: int


class NotLoaded(msgspec.Struct, frozen=True, tag="not_loaded"):
    """The follower cannot start. `kind` names the error class."""

    kind: str
    message: str


_ENCODER = msgspec.msgpack.Encoder()
_ANSWERS: msgspec.msgpack.Decoder[Joins | RankLoaded | NotLoaded] = msgspec.msgpack.Decoder(
    Joins | RankLoaded | NotLoaded
)
PLANS = msgspec.msgpack.Decoder(StepPlan)
LAUNCHES = msgspec.msgpack.Decoder(RankLaunch)


class StoppedError(Exception):
    """A signal stopped the process at the other end of a link; says for how long."""


class Link:
    """One end of the socket between rank 0 and another rank."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

        self._sending = threading.Lock()

    def send(self, message: RankLaunch | StepPlan | Joins | RankLoaded | NotLoaded) -> None:
        self.send_encoded(_ENCODER.encode(message))

    def send_encoded(self, body: bytes) -> None:
        """Send a message; an empty one says that the libraries are imported."""
        with self._sending:
            self._end.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def receive(self, sender: ProcessorTime | None = None) -> bytes | None:
        """The next message; None if the other end is gone. Raises `StoppedError` if the process `sender` is stopped."""
        length = self._read(_LENGTH_BYTES, sender)
        return None if length is None else self._read(int.from_bytes(length, "little"), sender)

    def close(self) -> None:
        self._end.close()

    def _read(self, num_bytes: int, sender: ProcessorTime | None) -> bytes | None:
        whole = bytearray()
        while len(whole) < num_bytes:
            if sender is not None:
                self._await(sender)
            try:
                part = self._end.recv(num_bytes - len(whole))
            except ConnectionResetError:  # it ended without reading what it was sent
                part = b""
            if not part:
                return None
            whole += part
        return bytes(whole)

    def _await(self, sender: ProcessorTime) -> None:
        """Wait until something can be read. The time is counted in short waits, so that a suspension of this process
        counts as one of them."""
        stopped_s = 0.0
        while not select.select([self._end], [], [], _TICK_S)[0]:
            stopped_s = stopped_s + _TICK_S if sender.is_stopped() else 0.0
            if stopped_s > _MAX_STOPPED_S:
                raise StoppedError(f"was stopped for {_MAX_STOPPED_S:g} s")


@dataclass(frozen=True, slots=True)
class _Follower:
    index: int
    process: subprocess.Popen[bytes]
    link: Link
    begins: Future[None] = field(default_factory=Future)
    joins: Future[None] = field(default_factory=Future)
    answer: Future[RankLoaded] = field(default_factory=Future)

    def take(self, message: Joins | RankLoaded | NotLoaded) -> bool:
        """Returns whether the follower goes on."""
        match message:
            case Joins():
                self.joins.set_result(None)
            case RankLoaded():
                self.answer.set_result(message)
            case NotLoaded(kind, text):
                self.fail(start_error(kind, f"rank {self.index}: {text}"))
                return False
        return True

    def fail(self, error: StartError) -> None:
        """It cannot start."""
        for future in (self.begins, self.joins, self.answer):
            if not future.done():
                future.set_exception(error)


class Followers:
    """The other ranks of this engine, seen from rank 0. An engine of one rank has none."""

    def __init__(self) -> None:
        self.exchange_fd: int | None = None
        """Memory through which all ranks exchange, or find each other if it is empty. Open until `close`."""
        self._all: list[_Follower] = []
        self._is_closing, self._is_loading = False, True

    @classmethod
    def start(cls, config: EngineConfig, *, is_urgent: bool = True) -> Followers:
        """Start a process for each rank but the first. It imports its libraries, and waits for `launch`. Those of a
        standby are not urgent: they import at low priority. Raises `StartError` if the system cannot."""
        followers = cls()
        count, followers._is_loading = config.tensor_parallel_size, is_urgent
        if count == 1:
            return followers
        try:
            shares_memory = config.exchange == "memory"
            num_bytes = EXCHANGE_HEADER_BYTES + count * EXCHANGE_BYTES if shares_memory else 0
            followers.exchange_fd = allocate(num_bytes)
            for index in range(1, count):
                followers._start(index, is_urgent=is_urgent)
        except OSError as error:
            followers.close()
            raise StartError(f"cannot start {count} ranks: {error.strerror or error}") from error
        return followers

    def _start(self, index: int, *, is_urgent: bool) -> None:
        assert self.exchange_fd is not None
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno()), str(os.getpid()), str(int(is_urgent))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self.exchange_fd),
            )
        follower = _Follower(index, process, Link(ours))
        self._all.append(follower)
        threading.Thread(target=self._watch, args=(follower,), name="inferd-rank", daemon=True).start()

    @property
    def are_none(self) -> bool:
        """Whether this engine has one rank."""
        return not self._all

    def launch(self, config: EngineConfig, log_style: LogStyle) -> None:
        """Have all load their parts of the model."""
        self._is_loading = True
        for follower in self._all:
            assert self.exchange_fd is not None
            launch = RankLaunch(config=config, index=follower.index, exchange_fd=self.exchange_fd, log_style=log_style)
            with contextlib.suppress(BrokenPipeError):  # it ended, and `wait_loaded` says how
                follower.link.send(launch)

    def wait_imported(self) -> None:
        """Wait until all have imported their libraries."""
        for follower in self._all:
            follower.begins.result()

    def wait_joining(self) -> None:
        """Wait until all are about to join the process group. Raises `StartError` with the message of a rank that
        cannot start."""
        for follower in self._all:
            follower.joins.result()

    def wait_loaded(self) -> tuple[RankLoaded, ...]:
        """The answers of all, once they have loaded. Raises `StartError` with the message of a rank that cannot start.

        From then on the end of a rank is this process's end, and so it was before `launch`.
        """
        return tuple(follower.answer.result() for follower in self._all)

    def _watch(self, follower: _Follower) -> None:
        """Take the follower's answer. End this process when the follower ends or is stopped, unless `wait_loaded` will
        say so: with SIGKILL if somebody else sent that, because then the server blames no request."""
        sender = ProcessorTime(follower.process.pid)
        try:
            body = follower.link.receive(sender)
            if body is not None:
                follower.begins.set_result(None)
            while body is not None:
                if body and not follower.take(_ANSWERS.decode(body)):
                    return
                body = follower.link.receive(sender)
            code = follower.process.wait()
            how = describe_exit(code)
        except StoppedError as error:
            code, how = -signal.SIGKILL, str(error)
        except (OSError, ValueError):  # the link was closed
            return
        if self._is_closing:
            return
        if self._is_loading and not follower.answer.done():
            follower.fail(StartError(f"rank {follower.index} {how} while it loaded its part"))
            return
        logger.error("rank %d %s: the engine ends with it", follower.index, how)
        if code == -signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(_EXIT_FAILED)

    def send(self, plan: StepPlan) -> None:
        """Have all run `plan` after those that were sent before."""
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
    """The followers of an `EngineLaunch` in JSON; none if the system cannot start them."""
    launch = msgspec.json.decode(line, type=EngineLaunch)
    try:
        return (Followers.start(launch.config, is_urgent=not launch.is_standby),)
    except StartError:
        return ()
