"""Two real models in one server: each answers as it does alone, and its series and states are its own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from inferd.engine.api.checkpoint import EMBEDDED_PATH

from .conftest import Daemon, children, free_model, is_engine

QUESTION = {"messages": [{"role": "user", "content": "What are you?"}], "max_tokens": 12, "seed": 7}


def ask(daemon: Daemon, model: str) -> Any:
    answer = httpx.post(f"{daemon.url}/v1/chat/completions", json={**QUESTION, "model": model}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_answers_as_it_does_alone(start: Callable[..., Daemon], daemon: Daemon, shapes: Path) -> None:
    two = start("tiny", f"small={shapes / 'smoke'}", "--kv-memory", "32MiB")
    alone, beside, small = ask(daemon, "tiny"), ask(two, "tiny"), ask(two, "small")
    assert beside["choices"] == alone["choices"] and beside["system_fingerprint"] == alone["system_fingerprint"]
    assert small["model"] == "small" and small["choices"] != alone["choices"]
    assert len(engines(two)) == 2
    card = two.output[two.output.index("READY in") :]
    assert ": 2 models at http" in card and "\n  tiny: float32" in card and "\n  small: " in card
    assert " tiny: weights" in two.output and " small: weights" in two.output


def test_a_model_that_cannot_be_loaded_leaves_the_others_alone(tmp_path: Path, start: Callable[..., Daemon]) -> None:
    """One tensor holds a NaN, which the engine finds as it loads. Then the file is repaired, and the model loaded."""
    broken = tmp_path / "broken"
    shutil.copytree(EMBEDDED_PATH, broken)
    weights = broken / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-2] + b"\xff\x7f")  # bfloat16
    daemon = start("tiny", str(broken), "--kv-memory", "16MiB", "--admin-key", "boss")
    assert ": 1 of 2 models at http" in daemon.output and "\n  broken: not served: " in daemon.output
    assert ask(daemon, "tiny")["choices"]
    failed = httpx.post(f"{daemon.url}/v1/chat/completions", json={**QUESTION, "model": "broken"}, timeout=60)
    assert "; POST /v1/models/broken/load tries it again" in daemon.output
    assert failed.status_code == 503 and failed.json()["error"]["code"] == "model_not_loaded"
    card = daemon.get("/v1/models/broken").json()
    assert card["status"] == "failed" and card["error"] in failed.json()["error"]["message"]
    assert "NaN" in card["error"] and str(tmp_path) not in card["error"]
    assert daemon.get("/health").json() == {"status": "ready", "models": {"tiny": "ready", "broken": "failed"}}
    assert post(daemon, "broken", "load").json()["error"]["code"] == "model_not_loaded"
    weights.write_bytes(good)
    assert "status" not in post(daemon, "broken", "load").json()
    assert ask(daemon, "broken")["choices"] == ask(daemon, "tiny")["choices"]


def post(daemon: Daemon, model: str, what: str) -> httpx.Response:
    url = f"{daemon.url}/v1/models/{model}/{what}"
    return httpx.post(url, headers={"Authorization": "Bearer boss"}, timeout=60)


def engines(daemon: Daemon) -> list[int]:
    return [pid for pid, command in children(daemon.process.pid).items() if is_engine(command)]


def test_requests_of_an_unloaded_model_start_its_engine_once(start: Callable[..., Daemon]) -> None:
    daemon = start("a=tiny", "b=tiny", "--admin-key", "boss", program=free_model(1))
    both = engines(daemon)
    assert len(both) == 2
    assert httpx.post(f"{daemon.url}/v1/models/a/unload", timeout=60).status_code == 401
    before = ask(daemon, "a")
    assert post(daemon, "a", "unload").json()["status"] == "unloaded"
    assert post(daemon, "a", "unload").json()["status"] == "unloaded"
    assert daemon.output.count("a: unloaded on request; the next request loads it") == 1
    (of_b,) = engines(daemon)
    assert of_b in both and daemon.get("/state").json()["status"] == "unloaded"
    assert ask(daemon, "b")["choices"] == before["choices"], "the other model goes on"
    assert daemon.get("/health").status_code == 200 and len(engines(daemon)) == 1
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(daemon, "a"), range(8)))
    assert [answer["choices"] for answer in answers] == [before["choices"]] * 8
    assert len(engines(daemon)) == 2 and daemon.output.count("a: loading the model") == 1
    assert answers[0]["system_fingerprint"] == before["system_fingerprint"]
    assert daemon.get("/state").json()["restarts"] == 0
    assert daemon.stop() == 0


def test_an_idle_model_is_unloaded_and_loaded_by_the_next_request(start: Callable[..., Daemon]) -> None:
    daemon = start("--idle-unload", "1s", program=free_model(1))
    deadline = time.monotonic() + 30
    while engines(daemon):
        assert time.monotonic() < deadline, daemon.output
        time.sleep(0.05)
    assert daemon.get("/health").json() == {"status": "ready", "models": {"tiny": "unloaded"}}
    assert ask(daemon, "tiny")["choices"]
    assert "unloaded after 1 s without a request; the next one loads it" in daemon.output
    assert daemon.stop() == 0, "the server stops as usual, with an engine or without"
