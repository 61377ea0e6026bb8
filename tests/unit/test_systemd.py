"""systemd's notifications, received by a real datagram socket."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.server.lifecycle.serve import Systemd


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """(socket of systemd, its name in NOTIFY_SOCKET)."""
    name = f"{tmp_path}/notify" if request.param == "path" else f"@inferd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0"))
        receiver.settimeout(10)
        yield receiver, name


def test_a_state_is_one_datagram(manager: tuple[socket.socket, str]) -> None:
    receiver, name = manager
    systemd = Systemd({"NOTIFY_SOCKET": name})
    systemd.tell("READY=1")
    systemd.tell("STOPPING=1")
    assert [receiver.recv(100), receiver.recv(100)] == [b"READY=1", b"STOPPING=1"]


def test_the_watchdog_is_fed_only_while_the_event_loop_runs(manager: tuple[socket.socket, str]) -> None:
    receiver, name = manager
    systemd = Systemd({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid())})

    async def run() -> None:
        pings = asyncio.create_task(systemd.keep_alive())
        loop = asyncio.get_running_loop()
        for _ in range(3):
            assert await loop.run_in_executor(None, receiver.recv, 100) == b"WATCHDOG=1"
        receiver.setblocking(False)
        while True:  # This coroutine lets no other run.
            try:
                receiver.recv(100)
            except BlockingIOError:
                break
        with pytest.raises(BlockingIOError):
            receiver.recv(100)
        pings.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    "environment",
    [
        {"WATCHDOG_USEC": "2000"},
        {"NOTIFY_SOCKET": "/nowhere"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "2000", "WATCHDOG_PID": "1"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "soon"},
    ],
)
def test_without_a_watchdog_of_this_process_there_are_no_pings(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(asyncio.wait_for(Systemd(environment).keep_alive(), 10))
    assert not caplog.records


def test_nothing_is_sent_without_a_manager(caplog: pytest.LogCaptureFixture) -> None:
    Systemd({}).tell("READY=1")
    assert not caplog.records


def test_a_manager_that_does_not_listen_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "inferd"):
        Systemd({"NOTIFY_SOCKET": f"{tmp_path}/none"}).tell("READY=1")
    assert "systemd was not told READY=1: No such file or directory" in caplog.text
