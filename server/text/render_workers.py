"""The server's side of the processes that render chat templates: starts them and asks them.

There is one process that forks (`RenderProcess`) in a server. A worker (`RenderWorker`) renders nothing but one
checkpoint's template. `RenderPool` in `template` has the workers of a checkpoint. All calls block, so they belong on
threads. Knows no messages.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from inferd.engine.api.process.processor_time import ProcessorTime
from inferd.server.text.render_wire import (
    FRAME_HEADER_BYTES,
    MAX_ANSWER_BYTES,
    RENDER_COMMAND,
    RENDER_WALL_S,
    STATUS_BYTES,
    WORKER_BEGAN,
    RenderAnswer,
    RenderQuestion,
    body_length,
    frame_of,
    read_answer,
)

logger = logging.getLogger("inferd.server")

_START_TIMEOUT_S = 60.0
"""Most seconds until the forking process has read its libraries. It takes one on an idle core."""

_FORK_TIMEOUT_S = 5.0
"""Most seconds that a forking process which has read its libraries could use, until a new worker begins. It takes a few
milliseconds. One that is stopped gets no more before it has read them."""

_LOOK_S = 0.25
"""Seconds between two looks at what a late forking process does."""

_STATUS_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 2.0

_QUIET_S = 60.0


class RenderError(Exception):
    """There is no rendered text, and the template gave no reason."""


class OvertimeError(RenderError):
    """The rendering was ended because it exceeded a time limit."""


class NotStartedError(RenderError):
    """The system refused what a new worker needs."""


class RarelyLogged:
    """Logs a kind of warning at most once a minute, with how often it happened."""

    def __init__(self) -> None:
        self._num, self._next_s = 0, 0.0

    def warn(self, message: str, *values: object) -> None:
        self._num += 1
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _QUIET_S
            logger.warning(f"{message} (%d since the start)", *values, self._num)


class RenderProcess:
    """The process that forks workers. It starts when it is first needed, and again if it has ended."""

    def __init__(self, command: Sequence[str] = RENDER_COMMAND) -> None:
        self._command = tuple(command)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_ready = False
        """Whether the process has read its libraries, since one of its workers began."""
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process if it does not run. Does not wait until it is ready."""
        with self._lock:
            self._running()

    def fork(self, program: bytearray) -> RenderWorker:
        """A new worker for the program's frame, which may not have begun. Raises `NotStartedError`, and `RenderError`
        once the server shuts down."""
        try:
            with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
                pairs = []
                for _ in ("source", "status"):
                    end, their_end = socket.socketpair()
                    pairs.append((ours.enter_context(end), theirs.enter_context(their_end)))
                (source, their_source), (status, their_status) = pairs
                with self._lock:
                    forker = self._send([their_source.fileno(), their_status.fileno()])
                ours.pop_all()
        except OSError as error:
            raise NotStartedError(f"no process can be started for it: {error}") from error
        return RenderWorker(source, status, program, lambda: self._await_begin(forker, source))

    def close(self) -> None:
        """End the process and its workers, for good."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _send(self, descriptors: list[int]) -> subprocess.Popen[bytes]:
        """Have a worker forked. Returns the process that forks it."""
        try:
            socket.send_fds(self._running(), [b"w"], descriptors)
        except OSError:  # it has ended, or reads nothing
            self._end()
            socket.send_fds(self._running(), [b"w"], descriptors)
        assert self._process is not None
        return self._process

    def _await_begin(self, forker: subprocess.Popen[bytes], source: socket.socket) -> None:
        """Wait until the worker behind `source` has begun. Ends `forker` if that takes too long. Raises `EOFError` if
        the worker does not begin."""
        limit_s = _FORK_TIMEOUT_S if self._is_ready else _START_TIMEOUT_S
        is_told = _is_told_within(limit_s, source, forker.pid)
        has_begun = is_told and source.recv(len(WORKER_BEGAN)) == WORKER_BEGAN
        with self._lock:
            is_current = self._process is forker  # no other thread has replaced it
            self._is_ready = self._is_ready or (has_begun and is_current)
            if not is_told and is_current:
                logger.warning("the process that forks those that render chat templates hangs; it is replaced")
                forker.kill()
                self._end()
        if not has_begun:
            raise EOFError

    def _running(self) -> socket.socket:
        if self._control is not None:
            return self._control
        if self._is_closed:
            raise RenderError("the server is shutting down")
        ours, theirs = socket.socketpair()
        ours.settimeout(_START_TIMEOUT_S)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a process with threads should not fork
        # A process group of its own, so that Ctrl-C does not end it. A session of its own would be another group of the
        # scheduler, in which a woken worker waits: on busy cores for 4 ms (2 cores of an AMD EPYC (Zen 4), 2026-11-28).
        with theirs:
            self._process = subprocess.Popen(
                self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, process_group=0
            )
        self._control, self._is_ready = ours, False
        return ours

    def _end(self) -> None:
        process, control, self._process, self._control = self._process, self._control, None, None
        if control is not None:
            control.close()
        if process is None:
            return
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@functools.cache
def render_process() -> RenderProcess:
    """The one of this server."""
    process = RenderProcess()
    atexit.register(process.close)
    return process


def _is_told_within(limit_s: float, source: socket.socket, forker_pid: int) -> bool:
    """Whether something arrives at `source`, or it ends, within seconds that the forking process could use."""
    clock = ProcessorTime(forker_pid)
    poll = select.poll()
    poll.register(source, select.POLLIN)
    late_s = stopped_s = 0.0
    while not poll.poll(_LOOK_S * 1_000):
        # Not the time that passed: this process may have been stopped too.
        late_s += _LOOK_S * clock.use().share
        stopped_s += _LOOK_S if clock.is_stopped() else 0.0
        if late_s > limit_s or stopped_s > _FORK_TIMEOUT_S:
            return False
    return True


class EndedError(Exception):
    """The worker has ended, or sent what no worker sends."""

    def __init__(self, signal_number: int | None) -> None:
        """`signal_number`: the signal that ended it; None if it ended in another way, or it is not known."""
        super().__init__(signal_number)
        self.signal_number = signal_number

    @property
    def reason(self) -> str:
        return "" if self.signal_number is None else f" by {signal.Signals(self.signal_number).name}"


class RenderWorker:
    """One process that renders one program. Used by one thread at a time."""

    def __init__(
        self, source: socket.socket, status: socket.socket, program: bytearray, await_begin: Callable[[], None]
    ) -> None:
        """`program`: sent before the first question, so that making a worker does not wait for it. `await_begin`:
        called before that; raises `EOFError` or `OSError` if the worker does not begin."""
        self._source, self._status, self._unsent = source, status, program
        self._await_begin: Callable[[], None] | None = await_begin
        self.is_stopped = False
        self._source.settimeout(RENDER_WALL_S + _START_TIMEOUT_S)
        self._status.settimeout(_STATUS_TIMEOUT_S)

    def __del__(self) -> None:
        self.close()

    def ask(self, question: RenderQuestion) -> tuple[RenderAnswer, int]:
        """The answer to a question, and the bytes of both. Raises `EndedError`, and `UnicodeEncodeError`."""
        frame = frame_of(question)
        num_sent = len(frame)
        try:
            if self._await_begin is not None:
                self._await_begin()
                self._await_begin = None
            program, self._unsent = self._unsent, bytearray()
            self._source.sendall(program)
            self._source.sendall(frame)
            frame.clear()  # it may be long, and so may be the answer
            num_bytes = body_length(bytes(self._read(FRAME_HEADER_BYTES)))
            if num_bytes <= MAX_ANSWER_BYTES:
                return read_answer(self._read(num_bytes)), num_sent + num_bytes
        except (OSError, EOFError, msgspec.MsgspecError):
            pass
        raise self._ended()

    def is_alive(self) -> bool:
        """Whether a worker that was not asked anything has not ended."""
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        return not poll.poll(0)

    def stop(self) -> None:
        """Have the thread that waits for an answer wait no longer. May be called by another thread."""
        self.is_stopped = True
        with contextlib.suppress(OSError):
            self._source.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the worker, at once even if it renders."""
        self._source.close()
        self._status.close()

    def _read(self, num_bytes: int) -> bytearray:
        whole = bytearray(num_bytes)
        rest = memoryview(whole)
        while rest:
            num_read = self._source.recv_into(rest)
            if num_read == 0:
                raise EOFError
            rest = rest[num_read:]
        return whole

    def _ended(self) -> EndedError:
        """How it ended. If it has not, it is killed now."""
        self._source.close()
        data = b""
        with contextlib.suppress(OSError):
            data = b"" if self.is_stopped else self._status.recv(STATUS_BYTES)
        self._status.close()
        status = int.from_bytes(data, "little")
        return EndedError(os.WTERMSIG(status) if data and os.WIFSIGNALED(status) else None)
