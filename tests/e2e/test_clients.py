"""Two of the clients of `make clients`, in the tests' environment: the official SDK, and curl's bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Daemon

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-clients"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Daemon]:
    """A server that requires a key."""
    daemon = Daemon("tiny", "--api-key", KEY)
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.stop()


@pytest.mark.parametrize("client", ["openai_python", "curl"])
def test_every_check_of_a_client_holds(guarded: Daemon, client: str) -> None:
    if client == "curl" and shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")
    folder = ROOT / "tests" / "clients"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        "INFERD_URL": guarded.url,
        "INFERD_KEY": KEY,
        "PYTHONPATH": str(folder),
    }
    command = [sys.executable, "-P", str(folder / client / "check.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if not line.startswith("ok "))
    assert done.stdout.count("ok ") >= 10
