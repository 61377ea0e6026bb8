"""The daemon serves the real model: transformers' greedy answers, answers by a schema, and calls of tools."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from benchmarks.quality.measure import NUM_ANSWER_TOKENS
from inferd.engine.api.checkpoint import Documents
from inferd.engine.api.machine.cpu import Machine
from inferd.server.commands.plan import build
from inferd.server.commands.plan_report import PlanRow
from inferd.server.config.settings import Settings
from inferd.server.lifecycle.models import read_models
from inferd.server.text.model import ServedModel
from tests.conftest import ROOT
from tests.e2e.conftest import Daemon
from tests.real.adapted import NAME, SERVED_TOLERANCE, served_nll, write_adapter
from tests.real.conftest import Recording
from tests.real.test_transformers import TOLERANCE
from tests.reliability.conftest import wait_until

LLAMA_SERVER = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
QUESTIONS = (ROOT / "benchmarks" / "quality" / "chats.txt").read_text(encoding="utf-8").splitlines()
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def daemon(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    adapted = write_adapter(tmp_path_factory.mktemp("adapter"), gguf)
    exact = ("--dtype", "float32", "--quantization", "none")
    served = Daemon("smollm2", *exact, "--kv-memory", "256MiB", "--lora", adapted)
    served.wait_ready()
    yield served
    served.process.terminate()
    served.process.wait(30)


def chat(url: str, question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": NUM_ANSWER_TOKENS, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_greedy_answers_are_those_of_transformers(daemon: Daemon, gguf: Path, recording: Recording) -> None:
    """All at once, so that prompts and answers share steps."""
    model = ServedModel.load(gguf, ("m",), max_model_len=512, vocab_size=2**31)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda question: chat(daemon.url, question), QUESTIONS[:16]))
    expected = [model.tokenizer.decode(one.answer, skip_special=True) for one in recording.chats]
    assert [choice["message"]["content"] for choice in found] == expected
    ended = [one.answer[-1] in model.eos_token_ids for one in recording.chats]
    assert [choice["finish_reason"] == "stop" for choice in found] == ended


def test_an_adapter_adds_its_products(daemon: Daemon, recording: Recording) -> None:
    """The file holds rows of q and k in another order than the adapter."""
    window = recording.windows[0]
    assert served_nll(daemon.url, NAME, window.ids) == pytest.approx(recording.adapted_nll, rel=SERVED_TOLERANCE)
    assert served_nll(daemon.url, "smollm2", window.ids) == pytest.approx(window.nll, rel=TOLERANCE)
    assert abs(recording.adapted_nll - window.nll) > 100 * TOLERANCE * window.nll


def test_an_answer_follows_its_schema(daemon: Daemon) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    choice = chat(daemon.url, "Name the capital of France and its population.", response_format=form)
    answer = json.loads(choice["message"]["content"])
    assert set(answer) == {"city", "population"} and isinstance(answer["population"], int)
    assert answer["city"] == "Paris"


def test_a_tool_is_called_if_it_must_be(daemon: Daemon) -> None:
    tool = {
        "type": "function",
        "function": {"name": "look_up", "description": "Facts about a city.", "parameters": CITY},
    }
    choice = chat(
        daemon.url, "Look up Paris.", tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert set(json.loads(call["function"]["arguments"])) == {"city", "population"}


@pytest.fixture(scope="module")
def llama_cpp(gguf: Path) -> Iterator[str]:
    """llama.cpp's server on the same file, if LLAMA_SERVER or the path has one."""
    if LLAMA_SERVER is None:
        pytest.skip("there is no llama-server: build llama.cpp, or set LLAMA_SERVER")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [LLAMA_SERVER, "-m", str(gguf), "--port", str(port), "-c", "2048", "-t", "2", "--jinja"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: process.poll() is not None or _is_healthy(url), what="llama-server")
            assert process.poll() is None, "llama-server ended"
            yield url
        finally:
            process.terminate()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


def test_llama_cpp_cuts_the_text_alike_and_answers_much_the_same(llama_cpp: str, recording: Recording) -> None:
    """It computes Q4_1 with activations in 8 bits, so some answers part after a while."""
    text = (ROOT / "benchmarks" / "quality" / "text.txt").read_text(encoding="utf-8")
    ids = httpx.post(f"{llama_cpp}/tokenize", json={"content": text}, timeout=60).json()["tokens"]
    assert ids == [token_id for window in recording.windows for token_id in window.ids]
    same = 0
    for one in recording.chats:
        body = {"prompt": one.prompt, "n_predict": 1, "temperature": 0, "return_tokens": True}
        same += httpx.post(f"{llama_cpp}/completion", json=body, timeout=60).json()["tokens"] == one.answer[:1]
    assert same >= 14


@pytest.mark.parametrize(("asked", "quantization"), [("auto", "int4"), ("none", "none"), ("int8", "int8")])
def test_blocks_are_kept_unless_another_format_is_asked_for(
    asked: Literal["auto", "none", "int8"], quantization: str, gguf: Path
) -> None:
    assert Settings().quantization == "auto"
    config = read_models(Settings(model=str(gguf), quantization=asked, device="cpu"))[0].config
    assert (config.keeps_blocks, config.quantization) == (asked == "auto", quantization)


def test_sampling_is_that_of_the_model_card_unless_a_request_says_otherwise(gguf: Path) -> None:
    read = Documents(gguf)
    assert {"temperature": 0.2, "top_p": 0.9}.items() <= (read("generation_config.json") or {}).items()
    assert read("special_tokens_map.json") is None
    model = ServedModel.load(gguf, ("smollm2",), max_model_len=8192, vocab_size=49152)
    assert (model.defaults.temperature, model.defaults.top_p) == (0.2, 0.9)
    assert model.eos_token_ids


def test_plan_shows_the_blocks_beside_what_they_can_be_dequantized_to(gguf: Path) -> None:
    def rows(quantization: str) -> dict[str, PlanRow]:
        settings = Settings(model=str(gguf), quantization=quantization, dtype="float32")  # on every processor
        report = build(settings, Machine.detect().on("cpu"))
        assert report.plan == next(row.plan for row in report.rows if row.name == report.chosen)
        return {row.name: row for row in report.rows}

    kept, dequantized = rows("auto"), rows("none")
    assert [*kept] == ["blocks", *dequantized] and all(row.refusal is None for row in kept.values())
    assert {name: row for name, row in kept.items() if name != "blocks"} == dequantized
    sizes = {name: row.plan.weights_bytes for name, row in kept.items() if row.plan is not None}
    assert sizes["blocks"] < sizes["int8"] < sizes["bfloat16"]
