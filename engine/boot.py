"""The engine process, from its first moment: what must hold while its libraries are still being read.

Reads the launch line from standard input and keeps that open: its end means the server is gone or wants this process
gone, and then it exits at once and leaves no sockets behind. Only then imports the engine, for a second or more.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import threading


def main() -> int:
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    _die_with_the_server(json.loads(line)["run_dir"])
    code: int = importlib.import_module("inferd.engine.process").main(line)
    return code


def _die_with_the_server(run_dir: str) -> None:
    """Exit at the end of standard input, which comes however the server ends.

    A terminal's Ctrl-C is the server's to handle: it lets running requests finish.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        # Not through sys.stdin, whose lock this thread would hold while the interpreter ends.
        while os.read(0, 4096):
            pass
        shutil.rmtree(run_dir, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="inferd-death-pipe", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
