"""`inferd serve`, whose server and engine record which of their functions call each other.

python tests/e2e/traced_server.py DIR serve [flags]

A process that gets SIGUSR1 begins a recording, and the next SIGUSR1 or SIGALRM ends it. The first recording ends by
itself after `IDLE_S`. DIR/PID.N appears when recording N of a process begins, and holds JSON when it has ended: a list
of [calling file, its function, called file, its function, number of calls].
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from inferd.engine.api.process import engine_process
from inferd.engine.process import boot

IDLE_S = 1.2
"""The engine's loop looks for work once a second, and everything else that runs beside requests does so more often."""
_EVENT_LOOPS = ("asyncio.runners", "uvloop")
_PREFIX = "inferd."


class Recorder:
    """Counts the calls between functions of inferd on all threads. Skips the libraries between two of them.

    A function that an event loop calls is counted without a caller. A coroutine counts when it begins, and not again
    when it goes on after an `await`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_recordings = folder, 0
        self._calls: Counter[tuple[str, str, str, str]] | None = None
        # Python can set this for another thread only before it begins. The main thread starts without, which is faster.
        threading.setprofile(self._profile)
        for number in (signal.SIGUSR1, signal.SIGALRM):
            signal.signal(number, self._switch)

    def _switch(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        file = self._folder / f"{os.getpid()}.{self._num_recordings}"
        if self._calls is None:
            self._calls = Counter()
            sys.setprofile(self._profile)
            file.touch()
            if self._num_recordings == 0:
                signal.setitimer(signal.ITIMER_REAL, IDLE_S)
            return
        sys.setprofile(None)
        calls, self._calls = self._calls, None
        whole = file.with_suffix(".whole")
        whole.write_text(json.dumps([(*call, num) for call, num in calls.items()]))
        whole.rename(file)
        self._num_recordings += 1

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        calls, code = self._calls, frame.f_code
        # The argument of the instruction RESUME is 0 at the start of a function, and not 0 after a yield or an await.
        if calls is None or event != "call" or not (called := _file_of(frame)) or code.co_code[frame.f_lasti + 1] & 3:
            return
        caller = frame.f_back
        while caller is not None and not _file_of(caller):
            caller = None if caller.f_globals.get("__name__") in _EVENT_LOOPS else caller.f_back
        begun_by = ("", "") if caller is None else (_file_of(caller), caller.f_code.co_qualname)
        calls[*begun_by, called, code.co_qualname] += 1


def _file_of(frame: FrameType) -> str:
    """The file of a function of inferd. Empty for libraries, and for functions without a source, as of dataclasses."""
    module: str = frame.f_globals.get("__name__", "")
    if not module.startswith(_PREFIX) or frame.f_code.co_filename.startswith("<"):
        return ""
    return module.removeprefix(_PREFIX).replace(".", "/") + ".py"


def main() -> None:
    folder, *arguments = sys.argv[1:]
    Recorder(Path(folder))
    if not arguments:  # the server below started this process as its engine
        sys.exit(boot.main())
    from inferd.server import cli  # noqa: PLC0415 (the engine does not need it)

    engine_process.ENGINE_COMMAND = (sys.executable, "-P", __file__, folder)
    sys.argv = ["inferd", *arguments]
    cli.main()


if __name__ == "__main__":
    main()
