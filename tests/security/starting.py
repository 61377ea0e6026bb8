"""A program that reads checkpoints as a start does, one folder after the other, and prints the result of each.

`python -m tests.security.starting FOLDER...` prints one line of JSON a folder: [folder, error class or "", message]. A
folder that needs more time than `LIMIT_S`, that blocks, or that needs too much memory ends the program.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from inferd.engine.api.errors import StartError
from inferd.server.config.settings import Settings
from inferd.server.lifecycle.models import read_models

LIMIT_S = 5
"""Maximum processor time of a folder in seconds. A busy machine does not extend it."""
WAIT_S = 30
"""Maximum time of a folder whose files block."""
LIMIT_BYTES = 6 * 2**30
"""Maximum address space. The libraries use 1 GiB of it before they read anything."""


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    for folder in sys.argv[1:]:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        signal.alarm(WAIT_S)
        try:
            read_models(Settings.load({"model": folder}, None))[0]
            kind, message = "", ""
        except StartError as error:
            kind, message = type(error).__name__, str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        print(json.dumps([folder, kind, message]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
