"""The workers that render one checkpoint's chat template. Replaces those that end, and asks again.

All calls block, so they belong on threads. `render_workers` starts the workers. Knows no messages.
"""

from __future__ import annotations

import signal
import time

from inferd.server.text.render_wire import RenderAnswer, RenderQuestion
from inferd.server.text.render_workers import (
    EndedError,
    NotStartedError,
    OvertimeError,
    RarelyLogged,
    RenderError,
    RenderProcess,
    RenderWorker,
    render_process,
)

_PAUSES_S = (0.05, 0.2)
"""Seconds between the attempts to render a conversation, if its worker is killed from outside or cannot be started."""

_MAX_IDLE = 2
"""Most idle workers of a checkpoint."""

_KEPT_BYTES = 2**20
"""A worker that took or gave more is replaced, which returns its memory. A new one compiles the template again."""


class RenderPool:
    """The workers of one program. Each is started when a rendering finds none idle."""

    def __init__(self, program: bytearray, process: RenderProcess | None = None) -> None:
        """`program`: a frame."""
        self._program, self._process = program, process or render_process()
        self._idle: list[RenderWorker] = []
        self._busy: set[RenderWorker] = set()
        self._num_closed = 0
        """Times that it was closed. A rendering that began before the last one is given up."""
        self._lost = RarelyLogged()

    def run(self, question: RenderQuestion) -> RenderAnswer:
        """The answer to the question. If its worker is killed from outside or cannot be started, another gets the
        question after a pause.

        Raises `OvertimeError` past a limit, and `RenderError` if no worker lives long enough.
        """
        num_closed = self._num_closed
        for pause_s in _PAUSES_S:
            try:
                return self._attempt(question, num_closed)
            except (EndedError, NotStartedError):
                time.sleep(pause_s)
        try:
            return self._attempt(question, num_closed)
        except EndedError as ended:
            raise RenderError(f"its process ended{ended.reason}, {len(_PAUSES_S) + 1} times") from ended

    def _attempt(self, question: RenderQuestion, num_closed: int) -> RenderAnswer:
        """The same, asked once. Raises `EndedError` if the worker ended, unless a limit or `close` ended it."""
        limits = question.limits
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
            raise

    def close(self) -> None:
        """End the idle workers. Renderings that run raise `RenderError`."""
        self._num_closed += 1
        for worker in tuple(self._busy):
            worker.stop()
        while self._idle:
            self._idle.pop().close()

    def _ask(self, question: RenderQuestion, num_closed: int) -> RenderAnswer:
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

    def _take(self) -> RenderWorker:
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                return self._process.fork(self._program)
            if worker.is_alive():
                return worker
            worker.close()
