"""No process of a daemon connects to another machine or looks up a name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Daemon, start
from tests.reliability.conftest import kill_engine, restarts, wait_until

from .hostile_checkpoints import config, copy_of_tiny, tokenizer_config

__all__ = ["start"]

SHIM = Path(__file__).parent / "egress.c"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
HI = [{"role": "user", "content": "Look at https://example.com/ please."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
IMAGE = [{"type": "image_url", "image_url": {"url": "http://192.0.2.1/a.png"}}]
MESSAGE_IMAGE = [{"type": "image", "source": {"type": "url", "url": "http://192.0.2.1/a.png"}}]
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "logprobs": 1}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 9, "structured_outputs": {"json": SCHEMA}}),
    ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"json": {"$ref": "http://192.0.2.1/schema"}}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": IMAGE}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": MESSAGE_IMAGE}], "max_tokens": 4}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}], "max_output_tokens": 4}),
    (
        "/v1/responses",
        {"input": "x", "tools": [{"type": "mcp", "server_label": "x", "server_url": "http://192.0.2.1"}]},
    ),
    ("/v1/embeddings", {"input": "x"}),
    ("/v1/rerank", {"query": "x", "documents": ["http://192.0.2.1/x"]}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "http://192.0.2.1/x"}),
)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("to see the calls of libraries takes Linux and a C compiler")
    library = tmp_path_factory.mktemp("shim") / "egress.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM, "-ldl"], check=True)
    return library


def watched(shim: Path, log: Path) -> dict[str, str]:
    """The environment of a process that is watched together with its children. It sets no offline mode."""
    return {"LD_PRELOAD": str(shim), "EGRESS_LOG": str(log), "HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""}


def outward(log: Path) -> list[str]:
    """The calls with an address of another machine: process, call and address."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in lines if line.split()[2] not in LOOPBACK]


def test_a_daemon_reaches_nobody(shim: Path, tmp_path: Path, start: Callable[..., Daemon]) -> None:
    """A model from the Hub's cache: start, requests that contain addresses, an engine's death, and the end."""
    folder, log = copy_of_tiny(tmp_path / "model"), tmp_path / "log"
    config(_name_or_path="mistralai/Mistral-7B-v0.1", base_model_name_or_path="meta-llama/Llama-3.1-8B")(folder)
    tokenizer_config(name_or_path="mistralai/Mistral-7B-v0.1", auto_map={"AutoTokenizer": ["a/b--c.D", None]})(folder)
    daemon = start(str(folder), env=watched(shim, log))
    for path, body in REQUESTS:
        answer = httpx.post(daemon.url + path, json=body, timeout=30)
        assert answer.status_code in (200, 400, 403), answer.text
    kill_engine(daemon)
    wait_until(lambda: restarts(daemon) == 1, what="another engine")
    assert daemon.stop(signal.SIGTERM) == 0
    assert outward(log) == []


@pytest.mark.parametrize("command", [["plan", "tiny"], ["doctor"]])
def test_no_command_reaches_anybody(shim: Path, tmp_path: Path, command: list[str]) -> None:
    log = tmp_path / "log"
    run = subprocess.run(
        [Path(sys.executable).parent / "inferd", *command],
        env={**os.environ, **watched(shim, log)}, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.stdout and outward(log) == []


DATAGRAMS = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
TO_TCP = "import time, zmq; s = zmq.Context().socket(zmq.PUSH); s.linger = 0; "


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        (DATAGRAMS + "s.connect(('192.0.2.1', 9))", "connect 192.0.2.1"),
        (DATAGRAMS + "s.sendto(b'x', ('192.0.2.2', 9))", "sendto 192.0.2.2"),
        (DATAGRAMS + "s.sendmsg([b'x'], [], 0, ('192.0.2.3', 9))", "sendmsg 192.0.2.3"),
        ("import socket; socket.getaddrinfo('192.0.2.4', 80)", "getaddrinfo 192.0.2.4"),
        (TO_TCP + "s.connect('tcp://192.0.2.5:9'); time.sleep(0.3)", "192.0.2.5"),
    ],
    ids=["connect", "sendto", "sendmsg", "lookup", "a library in C++"],
)
def test_the_watch_sees_who_does(shim: Path, tmp_path: Path, code: str, seen: str) -> None:
    log = tmp_path / "log"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **watched(shim, log)}, timeout=30, check=False)
    assert any(seen in line for line in outward(log)), log.read_text() if log.exists() else "nothing"
