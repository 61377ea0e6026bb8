"""An engine process that waits to be needed: its libraries are read, and nothing of the model is loaded.

Takes a second or two out of a restart, which is all of it for a small model, and no memory but that of the libraries:
weights are asked into the system's file cache, which gives them up where anybody needs the room. On a GPU it holds
nothing either: a context there would take memory that no plan counts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from inferd.engine.api.process.supervisor import Launch
from inferd.engine.api.wire.messages import STANDBY, Phase


def stand_by(
    launch: Launch, report: Callable[[Phase], None], bind_to_server: Callable[[Launch], None], promoted: threading.Event
) -> float:
    """Be as hard to orphan as an engine that serves, say that this is ready, and wait.

    `bind_to_server`: has the kernel end this process with that one, once something was reported. Returns when it was
    promoted (monotonic), from where its phases are to be counted.
    """
    report(Phase("libraries", time.monotonic() - launch.spawned_s, "read"))
    bind_to_server(launch)
    report(Phase(STANDBY, time.monotonic() - launch.spawned_s, "waits to be promoted"))
    _ask_into_file_cache(Path(launch.config.model_path))
    promoted.wait()
    return time.monotonic()


def _ask_into_file_cache(checkpoint: Path) -> None:
    """Weights that memory got short for are read again now, and not by those who wait for the next engine."""
    if sys.platform != "linux":
        return
    for file in checkpoint.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
