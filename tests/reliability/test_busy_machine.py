"""R5: healthy engines on a busy machine are left alone, also while they read a large vocabulary."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.busy import busy_machine
from tests.e2e.conftest import INFERD, Daemon
from tests.reliability.conftest import restarts, wait_until
from tests.vocabularies import VOCABULARIES, installed_tokenizer, save_model

NUM_BUSY = 4
LOWEST_PRIORITY = "19"
READY_WITHIN_S = 1800.0
ANSWERED_WITHIN_S = 1800.0
LONGEST, OTHERS = 600.0, 120.0
"""Seconds of the run with the largest vocabulary, and with each other one."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_engines_that_wait_for_a_processor_are_left_alone(name: str, tmp_path: Path) -> None:
    model = save_model(installed_tokenizer(name), name, tmp_path / name)
    with busy_machine(NUM_BUSY):
        daemon = Daemon(
            str(model), "--standby", "--log-level", "info", program=("nice", "-n", LOWEST_PRIORITY, str(INFERD))
        )
        try:
            wait_until(lambda: daemon._ready.is_set() or daemon.process.poll() is not None, READY_WITHIN_S, "READY")
            assert daemon.process.poll() is None, daemon.output
            started_s = time.monotonic()
            answer = asked(daemon, ANSWERED_WITHIN_S)
            print(f"{name}: the first answer to a schema came {time.monotonic() - started_s:.0f} s after READY")
            assert set(json.loads(answer["choices"][0]["text"])) == {"name", "count"}
            lasts_s = LONGEST if name == "gemma3" else OTHERS
            while time.monotonic() - started_s < lasts_s:
                assert asked(daemon, ANSWERED_WITHIN_S)["choices"] == answer["choices"]
            assert restarts(daemon) == 0
            assert not [line for line in daemon.lines if "engine process" in line or "standby ended" in line]
        finally:
            daemon.stop(signal.SIGKILL)


def asked(daemon: Daemon, within_s: float) -> dict[str, Any]:
    """The answer to a completion with a schema. A 429 is sent again after the time that it names."""
    body = {
        "model": "x",
        "prompt": "Who?",
        "max_tokens": 200,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "who", "strict": True, "schema": SCHEMA}},
    }
    body["model"] = httpx.get(f"{daemon.url}/v1/models", timeout=within_s).json()["data"][0]["id"]
    until_s = time.monotonic() + within_s
    while True:
        answer = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=within_s)
        if answer.status_code != 429:
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found
        assert time.monotonic() < until_s, answer.text
        with contextlib.suppress(KeyError):
            time.sleep(float(answer.headers["Retry-After"]))
