"""Adapters over HTTP: loaded at the start and at run time, there again after a crash, and unloaded while they are
used."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferd.engine.api.checkpoint import EMBEDDED_PATH, Checkpoint
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.registry import weights
from tests.cpu.adapters import write_adapter
from tests.reliability.conftest import restarts, wait_until

from .conftest import Daemon

ADMIN = {"Authorization": "Bearer the-admin-key"}


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    arch = ModelFacts.of(Checkpoint.read(EMBEDDED_PATH)).arch
    modules = [module for own in weights(arch).modules().values() for module in own]
    for seed, name in enumerate(("one", "two", "three")):
        shapes = {module.name: (module.out_size, module.in_size) for module in modules}
        write_adapter(tmp_path / name, shapes, seed=seed, rank=4, strength=0.5)
    return tmp_path


def ask(daemon: Daemon, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, **fields}
    return httpx.post(daemon.url + "/v1/completions", json=body, timeout=60)


def text(daemon: Daemon, model: str) -> str:
    answer = ask(daemon, model).json()
    assert answer["model"] == model
    return str(answer["choices"][0]["text"])


def fingerprint(daemon: Daemon, model: str) -> object:
    """The fingerprint in the answers of both APIs that show one."""
    response = httpx.post(daemon.url + "/v1/responses", json={"model": model, "input": "Hi", "max_output_tokens": 16})
    assert response.json()["system_fingerprint"] == ask(daemon, model).json()["system_fingerprint"]
    return response.json()["system_fingerprint"]


def change(daemon: Daemon, verb: str, **fields: object) -> httpx.Response:
    return httpx.post(f"{daemon.url}/v1/{verb}_lora_adapter", json=fields, headers=ADMIN, timeout=60)


def test_adapters_come_and_go(start: Callable[..., Daemon], adapters: Path) -> None:
    daemon = start("--lora", f"one={adapters / 'one'}", "--max-loras", "2", "--admin-key", "the-admin-key",
                   "--metrics-compat", "vllm")  # fmt: skip
    assert change(daemon, "load", lora_name="two", lora_path=str(adapters / "two")).text == (
        "Success: LoRA adapter 'two' added successfully."
    )
    wait_until(lambda: f"adapter 'two' is served from {adapters / 'two'}" in daemon.output)
    cards = {card["id"]: card for card in daemon.get("/v1/models").json()["data"]}
    assert {name: (card["parent"], card["root"]) for name, card in cards.items()} == {
        "tiny": (None, "tiny"), "one": ("tiny", "one"), "two": ("tiny", "two")
    }  # fmt: skip
    answers = {name: text(daemon, name) for name in ("tiny", "one", "two")}
    assert len(set(answers.values())) == 3
    message = {"model": "one", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert httpx.post(daemon.url + path, json=message, timeout=60).json()["model"] == "one"
    response = httpx.post(daemon.url + "/v1/responses", json={"model": "two", "input": "Hi", "max_output_tokens": 16})
    assert response.json()["model"] == "two"
    assert len({fingerprint(daemon, name) for name in answers}) == 3
    vectors = [
        httpx.post(daemon.url + "/v1/embeddings", json={"model": name, "input": "Hi"}).json()["data"][0]["embedding"]
        for name in ("tiny", "one")
    ]
    assert vectors[0] != vectors[1]

    third = {"lora_name": "three", "lora_path": str(adapters / "three")}
    assert "all of it is used" in change(daemon, "load", **third).json()["error"]["message"]
    os.kill(daemon.engine_pid, signal.SIGKILL)
    assert {name: text(daemon, name) for name in answers} == answers, "after a crash"
    wait_until(lambda: restarts(daemon) == 1)

    long = {"model": "one", "prompt": "Hi", "max_tokens": 1900, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    with httpx.stream("POST", daemon.url + "/v1/completions", json=long, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(daemon.engine_pid, signal.SIGSTOP)  # or the request could end before the adapter is unloaded
        wait_until(lambda: 'running_lora_adapters="one"' in daemon.get("/metrics").text, what="the request")
        assert change(daemon, "unload", lora_name="one").status_code == 200
        wait_until(lambda: "adapter 'one' is unloaded; 1 sequences that use it go on" in daemon.output)
        os.kill(daemon.engine_pid, signal.SIGCONT)
        refused = ask(daemon, "one")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert change(daemon, "unload", lora_name="one").status_code == 404
        *_, usage, end = filter(None, lines)
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 1900
    assert end == "data: [DONE]"
    wrong = change(daemon, "load", lora_name="x", lora_path=str(adapters / "none")).json()["error"]
    assert (wrong["param"], "is no directory" in wrong["message"]) == ("lora_path", True)
    assert change(daemon, "load", lora_name="tiny", lora_path=str(adapters / "one")).status_code == 400
    assert change(daemon, "load", **third).status_code == 200
    assert text(daemon, "three") not in answers.values()
    assert text(daemon, "two") == answers["two"]
