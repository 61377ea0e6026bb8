"""slowhttptest, which holds connections by being slow, in each of its modes against a live server on the loopback.

The server answers others meanwhile, and afterwards nothing is left of it. Runs in `make long` if the program is
installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable

import httpx
import psutil
import pytest

from tests.e2e.conftest import Daemon, free_model, start
from tests.reliability.conftest import count, wait_until

__all__ = ["start"]

NUM_CONNECTIONS = 400
SECONDS = 40
"""Duration of an attack. The deadlines of heads and bodies, 10 to 30 s, pass within it."""
MAX_GROWTH = 64 * 2**20
MODES = {
    "slow heads": ("-H", "-u", "{url}/live", "-i", "5", "-x", "24"),
    "slow bodies": ("-B", "-u", "{url}/v1/completions", "-f", "application/json", "-s", "65536", "-i", "5", "-x", "10"),
    "slow reads": ("-X", "-u", "{url}/openapi.json", "-w", "512", "-y", "1024", "-n", "5", "-z", "32", "-k", "3"),
    "ranges": ("-R", "-u", "{url}/live", "-t", "HEAD", "-a", "10", "-b", "3000"),
}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("slowhttptest") is None, reason="no slowhttptest: apt-get install slowhttptest")
@pytest.mark.parametrize("mode", MODES)
def test_slow_connections_cost_others_nothing_and_leave_nothing(start: Callable[..., Daemon], mode: str) -> None:
    daemon = start(program=free_model(1.0), may_fork=False)
    process = psutil.Process(daemon.process.pid)
    daemon.get("/openapi.json")  # made once, and kept
    rss, num_fds, num_tasks = process.memory_info().rss, process.num_fds(), count(daemon, "inferd_asyncio_tasks")

    common = ("-c", str(NUM_CONNECTIONS), "-r", "200", "-l", str(SECONDS), "-p", "5")
    command = ["slowhttptest", *common, *(part.format(url=daemon.url) for part in MODES[mode])]
    slow = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        num_answered = 0
        while slow.poll() is None:
            assert httpx.get(daemon.url + "/live", timeout=5).status_code == 200
            num_answered += 1
            try:
                slow.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
    finally:
        slow.kill()
    said = re.sub(r"\x1b\[[0-9;]*m", "", slow.communicate()[0])
    opened = [int(number) for number in re.findall(r"(?:connected|closed):\s+(\d+)", said)]
    # Ranges are answered so fast that it never sees a connection open.
    assert max(opened) >= NUM_CONNECTIONS / 2 or "No open connections left" in said, said
    assert num_answered > 0
    assert "YES" in said and not re.search(r"service available:\s+NO", said), said

    wait_until(lambda: process.num_fds() <= num_fds, what="descriptors are back")
    wait_until(lambda: count(daemon, "inferd_asyncio_tasks") <= num_tasks, what="tasks have ended")
    assert process.memory_info().rss - rss < MAX_GROWTH
    assert daemon.stop() == 0
