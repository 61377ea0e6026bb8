"""A server maps the weights that an earlier one packed, and so does the engine after a crash. What is damaged is packed
anew. The answers are the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.checkpoint import EMBEDDED_PATH
from inferd.kernels.cpu import library
from tests.e2e.conftest import INFERD, Daemon

KEPT = "packed weights are kept for later starts"
MAPPED = "mapped from an earlier start"
ON = {"INFERD_WEIGHT_CACHE": "true"}
QUESTION: dict[str, Any] = {"prompt": "The capital of France", "max_tokens": 40, "temperature": 0, "logprobs": 2}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    if not library.has_compiler():
        pytest.skip("only C++ kernels pack weights")
    copied = Path(shutil.copytree(EMBEDDED_PATH, tmp_path / "model"))
    os.utime(copied / "model.safetensors")  # a file of another time has an entry of its own
    return copied


def answer(daemon: Daemon) -> Any:
    made = daemon.client().completions.create(model="model", **QUESTION)
    return made.choices[0].model_dump()


def entries(model: Path) -> list[Path]:
    """The files of the cache with this model's weights."""
    listed = subprocess.run([INFERD, "cache", "ls", "--json"], capture_output=True, text=True, check=True).stdout
    return [Path(file["path"]) for file in json.loads(listed) if file["label"].startswith(str(model))]


def wait_for(text: str, daemon: Daemon) -> None:
    deadline_s = time.monotonic() + 60
    while text not in daemon.output:
        assert time.monotonic() < deadline_s, daemon.output
        time.sleep(0.05)


def test_the_next_start_maps_what_this_one_packed(start: Callable[..., Daemon], model: Path) -> None:
    first = start(str(model), env=ON)
    wait_for(KEPT, first)
    expected = answer(first)
    assert MAPPED not in first.output
    os.kill(first.engine_pid, signal.SIGKILL)
    assert answer(first) == expected, "by the next engine, from the file"
    first.stop()

    second = start(str(model), env=ON)
    assert MAPPED in second.output
    assert answer(second) == expected
    second.stop()

    (entry,) = entries(model)
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes(content)
    third = start(str(model), env=ON)
    assert "is damaged" in third.output and MAPPED not in third.output
    wait_for(KEPT, third)
    assert answer(third) == expected
    third.stop()

    assert MAPPED not in start(str(model), "--no-weight-cache").output
    entries(model)[0].unlink()
