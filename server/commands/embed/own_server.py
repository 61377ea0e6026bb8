"""A server of its own for a run of `inferd embed`: started on a free port of this machine, and ended with the run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator

from inferd.server.commands.embed.client import EmbedError

_PR_SET_PDEATHSIG = 1
_URL = re.compile(r"http://[^/\s]+:\d+")
_STOP_S = 30.0
"""Seconds that the server has to end after a run."""
_BROKEN_OFF_S = 1.0
"""Seconds that it has after a run that was broken off: nobody waits for its answers, and a step may take long."""


@contextlib.contextmanager
def own_server(model: str) -> Iterator[tuple[str, str]]:
    """(URL, API key) of a server with `model`, which other users of the machine cannot ask. Settings come from INFERD_*
    variables. Raises `EmbedError` if it does not start."""
    key = secrets.token_hex(16)
    command = [sys.executable, "-m", "inferd", "serve", model, "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "INFERD_API_KEY": key},
        start_new_session=True,  # Ctrl-C is for this process, which ends the server itself
        preexec_fn=_end_with_parent,
    )
    wait_s = _BROKEN_OFF_S
    try:
        yield _ready_url(process), key
        wait_s = _STOP_S
    finally:
        process.terminate()
        try:
            process.wait(wait_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()  # its engines end with it
            process.wait()


def _ready_url(process: subprocess.Popen[str]) -> str:
    """The server's URL, once it is ready."""
    assert process.stdout is not None
    last = deque[str](maxlen=1)
    for line in process.stdout:
        if line.strip():
            last.append(line.strip())
        found = _URL.search(line)
        if line.startswith("READY") and found is not None:
            # Its log must be read, or it would wait for a reader.
            threading.Thread(target=lambda: deque(process.stdout or (), maxlen=0), daemon=True).start()
            return found.group()
    process.wait()
    raise EmbedError(f"the server did not start: {last[0] if last else f'exit code {process.returncode}'}")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
