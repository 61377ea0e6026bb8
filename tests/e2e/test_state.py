"""/state of a running daemon."""

from __future__ import annotations

import hashlib

from inferd.engine.api.checkpoint import EMBEDDED_PATH
from tests.reliability.conftest import wait_until

from .conftest import Daemon


def test_steps_explain_themselves(daemon: Daemon) -> None:
    """A prompt of several tokens and the answer's decodes, against peaks measured at the start."""
    before = daemon.get("/metrics").text
    daemon.client().completions.create(model="tiny", prompt="one two three four", max_tokens=32, seed=1)
    state = daemon.get("/state").json()
    assert state["status"] == "ready"
    assert state["engine"]["peaks"]["read_bytes_per_s"] > 10**8
    assert state["engine"]["peaks"]["flops_per_s"] > 10**8
    for phase in ("prefill", "decode"):
        summary = state["last_minute"][phase]
        assert summary["steps"] >= 1
        assert summary["mfu"] > 0
        assert summary["mbu"] > 0
        assert summary["median_step_ms"] > 0
        assert summary["bound_by"] in ("compute", "memory", "host")
        assert flops(before, phase) < flops(daemon.get("/metrics").text, phase)
    assert any(line.split()[:1] == ["peaks"] or " peaks " in line for line in daemon.lines), daemon.output


def test_the_engine_can_be_found(daemon: Daemon) -> None:
    """An operator kills this process to see that a stream goes on."""
    assert [replica["pid"] for replica in daemon.get("/state").json()["replicas"]] == [daemon.engine_pid]


def test_the_weights_are_hashed(daemon: Daemon) -> None:
    file = EMBEDDED_PATH / "model.safetensors"
    expected = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    wait_until(lambda: daemon.get("/state").json()["model"]["weights_sha256"] == expected)


def flops(page: str, phase: str) -> float:
    name = f'inferd_step_flops_total{{model_name="tiny",phase="{phase}"}} '
    return next(float(line.removeprefix(name)) for line in page.splitlines() if line.startswith(name))
