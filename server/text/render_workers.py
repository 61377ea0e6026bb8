"""The server's side of the processes that render chat templates: starts them, asks them, and replaces those that end.

There is one process that forks (`RenderProcess`) in a server, and a few workers for each checkpoint (`RenderPool`),
which render nothing but its template. All calls block, so they belong on threads. Knows no messages.
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
from collections.abc import Sequence

import msgspec

from inferd.server.text.render_wire import (
    FRAME_HEADER_BYTES,
    MAX_ANSWER_BYTES,
    RENDER_COMMAND,
    RENDER_WALL_S,
    STATUS_BYTES,
    Answer,
    Question,
    body_length,
    frame_of,
    read_answer,
)

logger = logging.getLogger("inferd.server")

_START_TIMEOUT_S = 60.0
"""Most seconds until the forking process has read its libraries. It takes one on an idle core."""

_STATUS_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 2.0

_MAX_ATTEMPTS = 3
"""How often a conversation is rendered if each worker is killed from outside."""

_MAX_IDLE = 2
"""Most idle workers of a checkpoint."""

_KEPT_BYTES = 2**20
"""A worker that took or gave more is replaced, which returns its memory. A new one compiles the template again."""

_QUIET_S = 60.0


class RenderError(Exception):
    """There is no rendered text, and the template gave no reason."""


class OvertimeError(RenderError):
    """The rendering was ended because it exceeded a time limit."""


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
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process if it does not run. Does not wait until it is ready."""
        with self._lock:
            self._running()

    def fork(self, program: bytearray) -> Worker:
        """A new worker for the program's frame. Raises `RenderError` if the process cannot be started."""
        source, their_source = socket.socketpair()
        status, their_status = socket.socketpair()
        try:
            with their_source, their_status, self._lock:
                self._send([their_source.fileno(), their_status.fileno()])
        except OSError as error:
            source.close()
            status.close()
            raise RenderError(f"no process can be started for it: {error}") from error
        return Worker(source, status, program)

    def close(self) -> None:
        """End the process and its workers, for good."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _send(self, descriptors: list[int]) -> None:
        for is_last in (False, True):
            try:
                socket.send_fds(self._running(), [b"w"], descriptors)
            except OSError:  # it has ended, or reads nothing
                self._end()
                if is_last:
                    raise
            else:
                return

    def _running(self) -> socket.socket:
        if self._control is not None:
            return self._control
        if self._is_closed:
            raise BrokenPipeError("the server is shutting down")
        ours, theirs = socket.socketpair()
        ours.settimeout(_START_TIMEOUT_S)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a process with threads should not fork
        # A process group of its own, so that Ctrl-C does not end it. A session of its own would be another group of the
        # scheduler, in which a woken worker waits: on busy cores for 4 ms (2 cores of an AMD EPYC (Zen 4), 2026-11-28).
        with theirs:
            self._process = subprocess.Popen(
                self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, process_group=0
            )
        self._control = ours
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


class EndedError(Exception):
    """The worker has ended, or sent what no worker sends."""

    def __init__(self, signal_number: int | None) -> None:
        """`signal_number`: the signal that ended it; None if it ended in another way, or it is not known."""
        super().__init__(signal_number)
        self.signal_number = signal_number

    @property
    def reason(self) -> str:
        return "" if self.signal_number is None else f" by {signal.Signals(self.signal_number).name}"


class Worker:
    """One process that renders one program. Used by one thread at a time."""

    def __init__(self, source: socket.socket, status: socket.socket, program: bytearray) -> None:
        """`program`: sent before the first question, so that making a worker does not wait for it."""
        self._source, self._status, self._unsent = source, status, program
        self.is_stopped = False
        self._source.settimeout(RENDER_WALL_S + _START_TIMEOUT_S)
        self._status.settimeout(_STATUS_TIMEOUT_S)

    def __del__(self) -> None:
        self.close()

    def ask(self, question: Question) -> tuple[Answer, int]:
        """The answer to a question, and the bytes of both. Raises `EndedError`, and `UnicodeEncodeError`."""
        frame = frame_of(question)
        num_sent = len(frame)
        try:
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
        told = b""
        with contextlib.suppress(OSError):
            told = b"" if self.is_stopped else self._status.recv(STATUS_BYTES)
        self._status.close()
        status = int.from_bytes(told, "little")
        return EndedError(os.WTERMSIG(status) if told and os.WIFSIGNALED(status) else None)


class RenderPool:
    """The workers of one program. Each is started when a rendering finds none idle."""

    def __init__(self, program: bytearray, process: RenderProcess | None = None) -> None:
        """`program`: a frame."""
        self._program, self._process = program, process or render_process()
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._num_closed = 0
        """Times that it was closed. A rendering that began before the last one is given up."""
        self._lost = RarelyLogged()

    def run(self, question: Question) -> Answer:
        """The answer to the question. If its worker is killed from outside, another gets the question.

        Raises `OvertimeError` past a limit, and `RenderError` if no worker lives long enough.
        """
        limits = question.limits
        num_closed = self._num_closed
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                return self._ask(question, num_closed)
            except EndedError as ended:
                if self._num_closed != num_closed:
                    raise RenderError("the server is shutting down") from ended
                if ended.signal_number == signal.SIGPROF:
                    raise OvertimeError(f"it took more than {limits.cpu_s:g} s of processor time") from ended
                if ended.signal_number == signal.SIGALRM:
                    raise OvertimeError(f"it took longer than {limits.wall_s:g} s") from ended
                self._lost.warn("a process that renders chat templates ended%s before it had answered", ended.reason)
                if attempt == _MAX_ATTEMPTS:
                    raise RenderError(f"its process ended{ended.reason}, {attempt} times") from ended
        raise AssertionError

    def close(self) -> None:
        """End the idle workers. Renderings that run raise `RenderError`."""
        self._num_closed += 1
        for worker in tuple(self._busy):
            worker.stop()
        while self._idle:
            self._idle.pop().close()

    def _ask(self, question: Question, num_closed: int) -> Answer:
        worker = self._take()
        self._busy.add(worker)
        try:
            if self._num_closed != num_closed:  # too late for `close` to have seen the worker
                worker.close()
                raise EndedError(None)
            answer, num_bytes = worker.ask(question)
        finally:
            self._busy.discard(worker)
        is_last = question.limits.is_nice or answer.is_spent or num_bytes > _KEPT_BYTES
        if is_last or len(self._idle) >= _MAX_IDLE:
            worker.close()
        else:
            self._idle.append(worker)
        return answer

    def _take(self) -> Worker:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                return self._process.fork(self._program)
            if worker.is_alive():
                return worker
            worker.close()
