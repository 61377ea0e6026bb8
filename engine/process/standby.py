"""An engine process that waits to be promoted: its libraries are imported, and nothing of the model is loaded.

It saves a second or two of a restart, which for a small model is all of it. It takes no memory but that of the
libraries. The weights are read into the system's file cache, which drops them if memory is needed elsewhere. On a GPU
it holds nothing: a context there would take memory that no plan counts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from inferd.engine.api.pinned_files import PinnedFile
from inferd.engine.api.process.engine_process import EngineLaunch
from inferd.engine.api.wire.messages import STANDBY, Phase


def stand_by(
    launch: EngineLaunch,
    report: Callable[[Phase], None],
    bind_to_server: Callable[[EngineLaunch], None],
    wait: Callable[[], None],
) -> float:
    """Bind this process to the server, report that it is ready, and wait: `wait` returns once it is promoted.

    `bind_to_server` has the kernel end this process with the server; it may be called only after a report. Returns the
    time of promotion (monotonic), from which the phases of the start are counted.
    """
    report(Phase("libraries", time.monotonic() - launch.spawned_s, "read"))
    bind_to_server(launch)
    report(Phase(STANDBY, time.monotonic() - launch.spawned_s, "waits to be promoted"))
    _prefetch(launch.config.all_files)
    wait()
    return time.monotonic()


def _prefetch(files: Sequence[PinnedFile]) -> None:
    """Read weights that the file cache dropped now, so that the next engine's requests do not wait for them."""
    if sys.platform != "linux":
        return
    for file in files:
        try:
            descriptor = os.open(file.opened, os.O_RDONLY)
        except OSError:
            continue  # the engine reads it by its name, or reports it once it is promoted
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
