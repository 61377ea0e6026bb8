"""The process of a rank other than the first: loads its part of the model, then runs the plans that rank 0 sends.

Its argument is the descriptor of its socket to rank 0 (`engine/worker/followers`). It ends with rank 0, or when rank 0
closes the socket.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys

from inferd.engine.api.errors import StartError
from inferd.engine.api.process import garbage
from inferd.engine.api.process.logs import configure
from inferd.engine.worker.followers import LAUNCHES, PLANS, Link, NotLoaded
from inferd.engine.worker.load import load_follower

logger = logging.getLogger(__name__)

_EXIT_FAILED = 1
_PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    link = Link(socket.socket(fileno=descriptor))
    body = link.receive()
    if body is None:
        return 0
    launch = LAUNCHES.decode(body)
    _end_with(launch.parent_pid)
    configure(launch.log_style)
    try:
        runner, loaded = load_follower(launch)
    except StartError as error:
        link.send(NotLoaded(type(error).__name__, str(error)))
        return error.exit_code
    garbage.freeze_objects()
    link.send(loaded)
    try:
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
    sys.exit(main(int(sys.argv[1])))
