"""A temporary directory without a free byte ends neither a running server nor its next engine."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Daemon, free_model
from tests.reliability.conftest import count, engines, kill_engine, restarts, wait_until

ASKED = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    assert os.statvfs(folder).f_bavail == 0


@pytest.mark.sampled(keep=4, among="recoveries")
def test_a_full_temporary_directory_ends_no_server(
    start: Callable[..., Daemon], small_disk: Path, is_long: bool
) -> None:
    """The memory that server and engine share uses no file, and neither does a standby's or the next engine's."""
    daemon = start("--standby", program=free_model(1.0), env={"TMPDIR": str(small_disk)})
    fill(small_disk)
    for num_kills in range(2 if is_long else 1):
        assert httpx.post(f"{daemon.url}/v1/completions", json=ASKED, timeout=60).status_code == 200
        wait_until(lambda: count(daemon, "inferd_standby_ready") == 1 and len(engines(daemon)) == 2, within_s=240)
        kill_engine(daemon)
        wait_until(lambda num_kills=num_kills: restarts(daemon) > num_kills)  # type: ignore[misc]
    assert httpx.post(f"{daemon.url}/v1/completions", json=ASKED, timeout=60).status_code == 200
    assert daemon.process.poll() is None
    assert os.statvfs(small_disk).f_bavail == 0, "it was full throughout"
