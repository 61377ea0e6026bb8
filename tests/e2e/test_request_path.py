"""Few files are on the path of a request, so that a reader can follow it from the socket to the sampler and back.

A file is on the path if, during a chat, one of its functions calls a function of another file: it hands work on. Leaf
files do not count, because they only answer what their name says, such as the block pool or the table of errors. Files
in `kernels/` do not count either, nor do calls that an idle server makes too. Calls of the watchdog do not count: it
asks more about an engine whose steps are slow.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from .conftest import Daemon

MOST_ON_PATH = 57
MOST_THAT_RUN = 102
"""The limit for the path and its leaves together."""
NUM_CHATS = 4
"""Chats of each kind. Rarer calls do not count: they come from a timer or from the garbage collector."""
STATIONS = {
    "server/transport/connection.py", "server/endpoints/chat.py", "server/generate/intake.py",
    "server/dispatch/router.py", "server/transport/sse.py", "engine/process/main.py", "engine/core/loop.py",
    "engine/sched/scheduler.py", "engine/worker/runner.py", "engine/models/decoder.py", "engine/sample/sampler.py",
}  # fmt: skip
"""Some files that are certainly on the path."""

WATCHDOG = "server/supervision/watchdog.py"

Calls = Counter[tuple[str, str, str, str]]
"""(calling file, its function, called file, its function) -> how often. See `traced_server`."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files that ran for a chat."""

    path: dict[str, set[str]]
    """File on the path -> the functions of other files that it called."""
    leaves: set[str]

    def __str__(self) -> str:
        path = [f"{file} calls {', '.join(sorted(called)[:3])}" for file, called in sorted(self.path.items())]
        return "\n".join(
            [f"{len(path)} files on the path:", *path, f"{len(self.leaves)} leaves:", *sorted(self.leaves)]
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("recordings")
    program = (sys.executable, "-P", str(Path(__file__).with_name("traced_server.py")), str(folder))
    daemon = Daemon("--device", "cpu", program=program)
    try:
        daemon.wait_ready()
        recordings = [folder / f"{pid}.0" for pid in (daemon.process.pid, daemon.engine_pid)]
        switch(recordings)
        idle = ended(recordings)
        chat(daemon)  # the first one fills caches
        recordings = [file.with_suffix(".1") for file in recordings]
        switch(recordings)
        wait(recordings, 0)
        for _ in range(NUM_CHATS):
            chat(daemon)
        switch(recordings)
        return files_of(ended(recordings), idle)
    finally:
        daemon.stop(signal.SIGKILL)


def chat(daemon: Daemon) -> None:
    """Ask for a plain answer and for a stream."""
    for is_stream in (False, True):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": is_stream}
        httpx.post(f"{daemon.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def switch(recordings: list[Path]) -> None:
    """Begin these recordings, or end them."""
    for file in recordings:
        os.kill(int(file.stem), signal.SIGUSR1)


def wait(recordings: list[Path], least_bytes: int) -> None:
    """Wait until the files exist and are so long."""
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.stat().st_size >= least_bytes for file in recordings):
        assert time.monotonic() < deadline, "a traced process does not react"
        time.sleep(0.01)


def ended(recordings: list[Path]) -> Calls:
    """The calls of these recordings together, once they have ended."""
    wait(recordings, len("[]"))
    calls: Calls = Counter()
    for file in recordings:
        for *call, num in json.loads(file.read_text()):
            calls[tuple(call)] += num
    return calls


def files_of(calls: Calls, idle: Calls) -> Files:
    path: dict[str, set[str]] = defaultdict(set)
    ran = set()
    for (caller, function, called, called_function), num in calls.items():
        # The recording may end before the end of the last chat.
        if num < NUM_CHATS - 1 or caller == WATCHDOG or (caller, function, called, called_function) in idle:
            continue
        ran |= {caller, called}
        if caller != called:
            path[caller].add(f"{called}:{called_function}")
    path = {file: called for file, called in path.items() if is_counted(file)}
    return Files(path, {file for file in ran if is_counted(file) and file not in path})


def is_counted(file: str) -> bool:
    return bool(file) and not file.startswith("kernels/")


def test_few_files_are_on_the_path_of_a_request(files: Files) -> None:
    assert files.path.keys() >= STATIONS
    assert len(files.path) <= MOST_ON_PATH, f"{files}"


def test_few_files_run_for_a_request(files: Files) -> None:
    assert len(files.path) + len(files.leaves) <= MOST_THAT_RUN, f"{files}"
