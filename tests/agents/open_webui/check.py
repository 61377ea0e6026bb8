"""Open WebUI as a server of its own: a chat, streamed and with a title, over Chat Completions."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agent import HOME, MODEL, plan
from checks import BASE_URL, KEY, check, run

START_S = 200
VARIABLES = {
    "DATA_DIR": str(HOME / "data"),
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "secret",
    "OPENAI_API_BASE_URL": BASE_URL,
    "OPENAI_API_KEY": KEY,
    "ENABLE_OLLAMA_API": "False",
    "RAG_EMBEDDING_ENGINE": "openai",
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "ANONYMIZED_TELEMETRY": "False",
    "ENABLE_VERSION_UPDATE_CHECK": "False",
}


@contextmanager
def open_webui() -> Iterator[str]:
    """URL of the program's own server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (HOME / "data").mkdir()
    with open(HOME / "log", "w") as log:
        process = subprocess.Popen(
            ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **VARIABLES, "PYTHONPATH": ""}, stdout=log, stderr=log, cwd=HOME,
        )  # fmt: skip
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            try:
                asked(f"{url}/health")
            except OSError:
                assert process.poll() is None, (HOME / "log").read_text()[-3000:]
                assert time.monotonic() < deadline, (HOME / "log").read_text()[-3000:]
                time.sleep(1)
            else:
                break
        yield url
    finally:
        process.kill()
        process.wait()


def asked(url: str, body: Any = None, token: str = "") -> str:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return str(answer.read().decode())


@check
def a_chat() -> None:
    """the models are listed, and a chat is answered plain and streamed"""
    with open_webui() as url:
        token = json.loads(asked(f"{url}/api/v1/auths/signin", {"email": "admin@localhost", "password": "admin"}))[
            "token"
        ]
        models = json.loads(asked(f"{url}/api/models", token=token))["data"]
        assert MODEL in [model["id"] for model in models], models
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello. " + plan("Good day.")}]}
        plain = json.loads(asked(f"{url}/api/chat/completions", {**body, "stream": False}, token))
        assert plain["choices"][0]["message"]["content"] == "Good day.", plain
        streamed = asked(f"{url}/api/chat/completions", {**body, "stream": True}, token)
        lines = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
        text = "".join(
            choice["delta"].get("content") or "" for line in lines for choice in json.loads(line).get("choices", [])
        )
        assert text == "Good day.", streamed
        title = json.loads(asked(f"{url}/api/v1/tasks/title/completions", body, token))
        assert title["choices"], title


run()
