"""Runs Python programs in forks of a process that has imported the libraries of the server and of engines. The imports
are most of a daemon's start.

A fork has its program's arguments, environment, directory and output, and ends as the program would. It differs from a
process of its own in what Python and libraries read before: modules, environment variables, and the seed of hashes. The
process that forks engines and the one that forks those that render are forks of such a server in turn
(`_ForkedModule`). So they do not test which libraries these import: `tests/arch/test_start_imports` does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from inferd.engine.api.process import engine_process
from inferd.engine.models import meta_tensors

_LIBRARIES = (
    "inferd.server.commands.app", "inferd.server.lifecycle.serve", "inferd.server.text.rendering",
    "inferd.engine.process.main", "transformers.tokenization_utils_tokenizers", "uvicorn.lifespan.on",
)  # fmt: skip
_MODULES = "inferd.engine.process.forker", "inferd.server.text.render_process"
"""Programs that a server starts by `python -P -m`, and that become forks of it."""
_MAX_MESSAGE = 2**20
_READ_WHEN_USED = ("INFERD_", "TMPDIR", "NOTIFY_SOCKET")
"""Beginnings of the names of variables that nothing reads while it is imported."""
_END_S = 60.0
_MAX_SHOWN = 1000
"""Room for the command line that lists of processes show of a fork, besides that of this program's own."""
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46
"""Indices of `arg_start` and `arg_end` in `/proc/PID/stat`, counted from the field after the name
(proc_pid_stat(5))."""


def script_of(command: Sequence[str], environment: Mapping[str, str] | None) -> list[str] | None:
    """The Python script of a command and its arguments. None if a fork cannot run it: it is another program, or
    libraries may read one of the variables early. `environment`: variables besides those of this process."""
    words = [word for word in command if word not in (sys.executable, "-P")]
    is_script = words[0].endswith(".py") or os.path.basename(words[0]) == "inferd"
    is_late = all(name.startswith(_READ_WHEN_USED) for name in environment or ())
    return words if is_script and is_late and hasattr(os, "pidfd_open") else None


class Forked:
    """A program that runs in a fork. Has the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, status: socket.socket, stdout: IO[str]) -> None:
        self.pid, self.stdout, self._status = pid, stdout, status
        self.returncode: int | None = None
        self._reading = threading.Lock()

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises `TimeoutExpired`."""
        with self._reading:
            if self.returncode is None:
                self._status.settimeout(timeout)
                try:
                    self.returncode = _number(self._status)
                except (TimeoutError, BlockingIOError):
                    raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0) from None
                self._status.close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Client:
    """Starts the process that forks, when it is first needed."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def request(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        with self._starting:
            if self._control is None:
                self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    number = str(theirs.fileno())
                    # As engines have it. Among other things, threads of numpy's library would not survive a fork.
                    environment = {**engine_process.ENVIRONMENT, **os.environ, "OPENBLAS_NUM_THREADS": "1"}
                    command = [sys.executable, "-P", __file__, number, " " * _MAX_SHOWN]
                    self._process = subprocess.Popen(
                        command, pass_fds=[theirs.fileno()], env=environment,
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    )  # fmt: skip
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)

    def end(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait(_END_S)
            self._control = self._process = None


_client = _Client()


def start(
    script: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    stderr: int | None = None,
    max_cpu_s: int = resource.RLIM_INFINITY,
    max_file_bytes: int = resource.RLIM_INFINITY,
) -> Forked:
    """Run a script with its arguments. `stdout` of the result has its output, and also its errors unless `stderr`, a
    descriptor, is given. `environment`: more variables. The kernel ends a process that needs more than `max_cpu_s`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output, to_output = os.pipe()
    message = {
        "script": [*script], "environment": {**os.environ, **(environment or {})}, "folder": os.getcwd(),
        "limits": [(resource.RLIMIT_CPU, max_cpu_s), (resource.RLIMIT_FSIZE, max_file_bytes)],
    }  # fmt: skip
    with theirs:
        _client.request(message, [to_output, to_output if stderr is None else stderr, theirs.fileno()])
    os.close(to_output)
    return Forked(_number(ours), ours, open(output, encoding="utf-8"))


def end() -> None:
    """End the process that forks, and its forks."""
    _client.end()


def _number(connection: socket.socket) -> int:
    message = connection.recv(64)
    if not message:
        raise RuntimeError("the process that forks has ended: see its error above")
    return int(message)


def _fork_for(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each message of a socket until it ends. Returns in each fork with its message, and None at the end."""
    ready = selectors.DefaultSelector()
    ready.register(control, selectors.EVENT_READ)
    forks: dict[int, tuple[int, socket.socket]] = {}
    """File descriptor of a fork -> its process id, and where its end is told."""
    while ready.get_map():
        for key, _ in ready.select():
            if key.fd in forks:
                ready.unregister(key.fd)
                os.close(key.fd)
                pid, status = forks.pop(key.fd)
                _tell(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                status.close()
                continue
            message, descriptors, *_ = socket.recv_fds(control, _MAX_MESSAGE, 3)
            if not message:
                ready.unregister(control)
                for pid, _ in forks.values():
                    os.kill(pid, signal.SIGKILL)
                continue
            pid, (output, errors, to_client) = os.fork(), descriptors
            if not pid:
                os.dup2(output, 1)
                os.dup2(errors, 2)
                ready.close()
                for each in (control, *(status for _, status in forks.values())):
                    each.close()
                for descriptor in {*descriptors, *forks}:
                    os.close(descriptor)
                found: dict[str, Any] = json.loads(message)
                return found
            os.close(output)
            os.close(errors)
            status, end_of_fork = socket.socket(fileno=to_client), os.pidfd_open(pid)
            forks[end_of_fork] = pid, status
            ready.register(end_of_fork, selectors.EVENT_READ)
            _tell(status, pid)
    return None


def _tell(status: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it
        status.send(str(number).encode())


class _ForkedModule(subprocess.Popen[Any]):
    """A child of this process that runs a module of `_MODULES` without importing its libraries anew. Any other command
    is run as always, and so is every one once this process has threads."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        """Takes the parameters of Python's own method, after which all of the child's descriptors are known."""
        words = [*args] if isinstance(args, list | tuple) else []
        is_module = words[:3] == [sys.executable, "-P", "-m"] and words[3] in _MODULES
        if not is_module or len(os.listdir("/proc/self/task")) > 1:
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        _, _, _, pass_fds, cwd, env, _, _, _, stdin, to_stdin, from_stdout, stdout, from_stderr, stderr, *rest = others
        assert (cwd, from_stdout, from_stderr, stderr) == (None, -1, -1, -1), "a child as servers start them"
        starts_session, process_group = rest[-2:]
        self.pid = os.fork()
        if not self.pid:

            def prepare() -> None:
                os.setsid() if starts_session else os.setpgid(0, process_group)
                os.dup2(stdin, 0)
                os.dup2(stdout, 1)
                _close_all_but({0, 1, 2, *pass_fds})

            _run_module(words, env, prepare)
        self._child_created = True
        self._close_pipe_fds(stdin, to_stdin, from_stdout, stdout, from_stderr, stderr)  # type: ignore[attr-defined]


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # that of the list itself
                os.close(int(name))


def _run_module(words: Sequence[str], environment: Mapping[str, str], prepare: Callable[[], None]) -> NoReturn:
    """Run `python -P -m MODULE ...` as this process after `prepare`, and end it without returning to the server's
    code."""
    code: object = 1
    try:
        prepare()
        atexit._clear()
        subprocess.Popen = _own_popen  # type: ignore[misc]
        os.environ.clear()
        os.environ.update(environment)
        _show(words)
        sys.argv = [*words[3:]]
        runpy.run_module(words[3], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


_own_popen = subprocess.Popen


def _show(words: Sequence[str]) -> None:
    """Have lists of processes show this command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    line = "\0".join(words).encode()[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def main() -> None:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    meta_tensors.leave_out()
    for name in _LIBRARIES:
        __import__(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack threads"
    gc.collect()
    gc.freeze()
    asked = _fork_for(socket.socket(fileno=int(sys.argv[1])))
    if asked is None:
        return
    gc.unfreeze()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    tempfile.tempdir = None  # Python determines the directory only once
    for limit, most in asked["limits"]:
        resource.setrlimit(limit, (most, most))
    sys.argv = asked["script"]
    _show([sys.executable, *sys.argv])
    subprocess.Popen = _ForkedModule  # type: ignore[misc]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
