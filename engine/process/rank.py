"""The process of a rank other than the first: loads its part of the model, then runs the plans that rank 0 sends.

Its arguments are the descriptor of its socket to rank 0 (`engine/worker/followers`), rank 0's process id, and whether
to import its libraries at normal priority. It ends with rank 0, or when rank 0 closes the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys

from inferd.engine.api.errors import StartError
from inferd.engine.api.process import garbage
from inferd.engine.api.process.logs import configure
from inferd.engine.models import meta_tensors
from inferd.engine.process.boot import import_engine
from inferd.engine.worker.followers import LAUNCHES, PLANS, Joins, Link, NotLoaded

logger = logging.getLogger(__name__)

_WORKER = "inferd.engine.worker.load"
_EXIT_FAILED = 1
_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent_pid: int, is_urgent: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    _end_with(parent_pid)
    link = Link(socket.socket(fileno=descriptor))
    meta_tensors.leave_out()
    worker = import_engine(_WORKER, is_urgent=bool(is_urgent))
    with contextlib.suppress(OSError):  # rank 0 is gone, and `receive` says so
        link.send_encoded(b"")
    body = link.receive()
    if body is None:
        return 0
    launch = LAUNCHES.decode(body)
    configure(launch.log_style)
    try:
        runner, loaded = worker.load_follower(launch, lambda: link.send(Joins()))
    except StartError as error:
        link.send(NotLoaded(type(error).__name__, str(error)))
        return error.exit_code
    garbage.freeze_objects()
    link.send(loaded)
    try:
        runner.record_steps(lambda done, total: None)
        while (body := link.receive()) is not None:
            runner.launch(PLANS.decode(body))
    except Exception:
        logger.exception("rank %d failed", launch.index)
        # At once: rank 0 waits for this rank, and ends with it.
        os._exit(_EXIT_FAILED)
    return 0


def _end_with(parent_pid: int) -> None:
    """Have the kernel end this process with rank 0, even while it waits in an exchange."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
