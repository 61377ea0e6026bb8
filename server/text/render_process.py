"""Processes that render chat templates, so that a rendering without end can be killed, even within one call into C.

The server starts it as `python -P -m inferd.server.text.render_process`. Standard input is a socket. For each pair of
descriptors that comes over it, this process forks a worker, which takes a few milliseconds. A worker reads its program
and then questions from the first descriptor, and writes answers to it. It bounds each rendering by timers whose signals
end it. Once a worker has ended, its wait status is written to the second descriptor. If the server closes that one
before, the worker is killed. All of them end when standard input closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import select
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path

from inferd.engine.api.errors import CapacityError, shortage
from inferd.server.text.render_wire import (
    FRAME_HEADER_BYTES,
    RENDER_MEMORY_BYTES,
    STATUS_BYTES,
    WORKER_BEGAN,
    Limits,
    Program,
    RenderAnswer,
    body_length,
    frame_of,
    read_program,
    read_question,
)
from inferd.server.tools.single_files import skip_code_of

MAX_WORDS = 1_000
"""Most characters of a template's error that are sent."""

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
"""A tenth of the processor share of a normal process."""


def main() -> int:
    """Fork workers until the input ends."""
    # It notices the end of its input once it is ready. Until then the kernel ends it with the server.
    _die_with_parent(signal.SIGKILL)
    if _has_ended_input():
        return 0
    # So this process starts in 0.3 s of processor time instead of 0.7, and takes 45 MiB instead of 64 (one core, AMD
    # EPYC Zen 4, transformers 5.23, 2026-11-28).
    skip_code_of("transformers", "transformers.utils")
    try:
        importlib.import_module("inferd.server.text.rendering")
    except Exception as error:
        if shortage(error) is None:
            raise
        return CapacityError.exit_code  # the server has as little memory, and says so
    # The kernel's parent is one thread of the server, which may end before the server does.
    _die_with_parent(0)

    gc.freeze()  # the collector then leaves these pages alone, so that workers share them
    _Forker().run()
    return 0


def _die_with_parent(signal_number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def _has_ended_input() -> bool:
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


class _Forker:
    """Forks workers, kills those that the server wants no more, and tells how each ended."""

    def __init__(self) -> None:
        self._control = socket.socket(fileno=os.dup(0))
        os.close(0)
        self._woken, self._wakes = socket.socketpair()
        """Python writes to the second whenever a worker has ended."""
        self._workers: dict[int, int] = {}
        """Process id of a worker -> descriptor to which its wait status is written."""
        self._ready = selectors.DefaultSelector()

    def run(self) -> None:
        """Go on until the input ends."""
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._ready.register(self._control, selectors.EVENT_READ)
        self._ready.register(self._woken, selectors.EVENT_READ)
        while True:
            # Ended workers come first: the system may use their process ids again.
            for key, _ in sorted(self._ready.select(), key=lambda event: event[0].fileobj is not self._woken):
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._report_ended()
                elif key.data in self._workers:
                    os.kill(key.data, signal.SIGKILL)
                    self._ready.unregister(key.fileobj)
                elif key.fileobj is self._control and not self._fork_next():
                    signal.set_wakeup_fd(-1)  # workers end now, and the descriptor is closed with this object
                    return

    def _fork_next(self) -> bool:
        """Fork the worker that the server asks for. False at the end of the input."""
        _, descriptors, _, _ = socket.recv_fds(self._control, 1, 2)
        if not descriptors:
            return False
        source, status = descriptors
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # the system has no process or no memory left
            print(f"inferd: cannot fork a process to render a chat template: {error}", file=sys.stderr, flush=True)
            os.close(source)
            os.close(status)
            return True
        if pid == 0:
            try:
                self._close_all(status)
                _prepare(parent)
                _work(socket.socket(fileno=source))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(source)
        self._workers[pid] = status
        self._ready.register(status, selectors.EVENT_READ, pid)
        return True

    def _close_all(self, status: int) -> None:
        """Runs in a new worker: it keeps no descriptor that is not its own."""
        signal.set_wakeup_fd(-1)
        self._ready.close()
        for end in (self._control, self._woken, self._wakes):
            end.close()
        for other in (status, *self._workers.values()):
            os.close(other)

    def _report_ended(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            target = self._workers.pop(pid)
            with contextlib.suppress(KeyError):  # it was killed
                self._ready.unregister(target)
            with contextlib.suppress(OSError):  # the server has closed its end
                os.write(target, status.to_bytes(STATUS_BYTES, "little"))
            os.close(target)


# -- in a worker -------------------------------------------------------------------------------------------------------


def _prepare(parent: int) -> None:
    """Runs in a new worker: no signal of its parent's, and bounds on what it may do."""
    for number in (signal.SIGCHLD, signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    _die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # a system that does not report the memory in use: it stays unbounded
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = num_pages * os.sysconf("SC_PAGE_SIZE") + RENDER_MEMORY_BYTES
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        if most == resource.RLIM_INFINITY or limit < most:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _work(source: socket.socket) -> None:
    """Answer until the server closes its end."""
    with contextlib.suppress(ConnectionError):
        source.sendall(WORKER_BEGAN)
        body = _read_frame(source)
        program = None if body is None else read_program(body)
        while program is not None and (body := _read_frame(source)) is not None:
            source.sendall(_answer(program, body))
    os._exit(0)


def _answer(program: Program, body: bytearray) -> bytearray:
    """The frame of the answer to a question. A signal ends this process if that takes too long."""
    from inferd.server.text.rendering import TEMPLATE_ERRORS, answer  # noqa: PLC0415

    try:
        question = read_question(body)
        _start_timers(question.limits)
        frame = frame_of(answer(program, question))
    except MemoryError:
        words = (
            f"they take more than {RENDER_MEMORY_BYTES // 2**20} MiB of memory to render; send fewer, or shorter ones"
        )
        frame = frame_of(RenderAnswer(refusal=words, is_spent=True))
    except TEMPLATE_ERRORS as error:
        frame = frame_of(RenderAnswer(refusal=_words_of(error)))
    _stop_timers()
    return frame


def _words_of(error: Exception) -> str:
    """The template wrote some of these words, so they may hold anything."""
    words = str(error)[:MAX_WORDS] or type(error).__name__
    return words.encode(errors="replace").decode()


def _start_timers(limits: Limits) -> None:
    """Both signals end the process at once: nothing handles them, so that a call into C delays neither."""
    if limits.is_nice:
        _lower_priority()
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)


def _lower_priority() -> None:
    """If Linux groups by session, it weighs sessions before the processes in one. So this process gets its own."""
    with contextlib.suppress(OSError):
        os.setsid()
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def _stop_timers() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.setitimer(signal.ITIMER_PROF, 0.0)


def _read_frame(source: socket.socket) -> bytearray | None:
    """The body of the next frame; None at the end of the input."""
    header = _read(source, FRAME_HEADER_BYTES)
    return None if header is None else _read(source, body_length(bytes(header)))


def _read(source: socket.socket, num_bytes: int) -> bytearray | None:
    whole = bytearray(num_bytes)
    rest = memoryview(whole)
    while rest:
        num_read = source.recv_into(rest)
        if num_read == 0:
            return None
        rest = rest[num_read:]
    return whole


if __name__ == "__main__":
    sys.exit(main())
