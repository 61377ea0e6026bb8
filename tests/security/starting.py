"""A program: goes through what a start reads of checkpoints, one folder after the other, and says what came of each.

`python -m tests.security.starting FOLDER...` prints one line of JSON a folder: [folder, error class or "", message]. A
folder that takes longer than `LIMIT_S` ends the program, and so does one that is waited for, or takes more memory.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from inferd.engine.api.errors import StartError
from inferd.server.config.settings import Settings
from inferd.server.lifecycle.serve import read_model

LIMIT_S = 5
"""Of processor time, which a busy machine does not stretch."""
WAIT_S = 30
"""Of a folder whose files are waited for."""
LIMIT_BYTES = 6 * 2**30
"""Of address space. The libraries have 1 GiB of it before they have read anything."""


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    for folder in sys.argv[1:]:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        signal.alarm(WAIT_S)
        try:
            read_model(Settings.load({"model": folder}, None))
            kind, message = "", ""
        except StartError as error:
            kind, message = type(error).__name__, str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        print(json.dumps([folder, kind, message]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
