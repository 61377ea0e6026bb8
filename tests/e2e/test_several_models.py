"""Two real models in one server: each answers as it does alone, and its series and states are its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Daemon, children, is_engine

QUESTION = {"messages": [{"role": "user", "content": "What are you?"}], "max_tokens": 12, "seed": 7}


@pytest.fixture(scope="module")
def two(shapes: Path) -> Iterator[Daemon]:
    served = Daemon("tiny", f"small={shapes / 'smoke'}", "--kv-memory", "32MiB")
    try:
        served.wait_ready()
        yield served
    finally:
        served.stop(signal.SIGKILL)


def ask(daemon: Daemon, model: str) -> Any:
    answer = httpx.post(f"{daemon.url}/v1/chat/completions", json={**QUESTION, "model": model}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_answers_as_it_does_alone(two: Daemon, daemon: Daemon) -> None:
    alone, beside, small = ask(daemon, "tiny"), ask(two, "tiny"), ask(two, "small")
    assert beside["choices"] == alone["choices"] and beside["system_fingerprint"] == alone["system_fingerprint"]
    assert small["model"] == "small" and small["choices"] != alone["choices"]
    assert len([command for command in children(two.process.pid).values() if is_engine(command)]) == 2


def test_the_start_names_both(two: Daemon) -> None:
    card = two.output[two.output.index("READY in") :]
    assert ": 2 models at http" in card and "\n  tiny: float32" in card and "\n  small: bfloat16" in card
    assert " tiny: weights" in two.output and " small: weights" in two.output
